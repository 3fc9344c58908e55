"""Engine: takes requests, runs steps until they are finished, keeps pages and counts straight."""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace

from jaxmoe.engine.batch import RowInput, build_batch
from jaxmoe.engine.compile_watch import CompileWatch
from jaxmoe.engine.pages import PagePool
from jaxmoe.engine.request import Completion, SamplingParams, Sequence, check_request
from jaxmoe.engine.runner import Runner, SamplingBatch
from jaxmoe.engine.scheduler import Decision, place, schedule
from jaxmoe.errors import EngineError


class Engine:
    """A synchronous engine: `submit` requests, then `run` until all are finished."""

    def __init__(self, runner: Runner, *, eos_ids: frozenset[int] = frozenset(), poison: bool = False):
        """Args: runner: compiled by `warm_up`; eos_ids: tokens that end an answer; poison: debug mode."""
        self.runner = runner
        self.config = runner.config
        self._eos_ids = eos_ids
        self._poison = poison
        self._pools = [PagePool(self.config.pages) for _ in range(runner.shards)]
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._next_id = 0
        self._watch = CompileWatch()
        self._compiles_at_ready: int | None = None
        self.steps = 0

    def warm_up(self) -> None:
        """Compiles every layout and runs each once on padding; afterwards nothing may compile."""
        layouts = self.config.layouts()
        self.runner.compile(layouts)
        if self._poison:
            self._poison_free_pages()
        for layout in layouts:
            batch = build_batch(
                layout,
                [],
                [[] for _ in self._pools],
                config=self.config,
                shards=self.runner.shards,
                vocab=self.runner.manifest.config.vocab,
            )
            self.runner.generate(layout, batch, SamplingBatch.greedy(self.runner.shards * layout.rows))
        self._compiles_at_ready = self._watch.count

    @property
    def compilations_after_warm_up(self) -> int:
        """Compilations since `warm_up` ended; a correct engine keeps it at 0."""
        return 0 if self._compiles_at_ready is None else self._watch.count - self._compiles_at_ready

    @property
    def pages_in_use(self) -> int:
        """Pages of running requests over all devices."""
        return sum(pool.used for pool in self._pools)

    def submit(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """Queues a request and returns its id.

        Raises:
            RequestError: the prompt is empty, has tokens that do not exist, or does not fit context or pool; checked
                before anything is queued, so a refused request disturbs nobody.
        """
        self.check_request(prompt_ids, params)
        sequence = Sequence(
            request_id=self._next_id, tokens=list(prompt_ids), prompt_length=len(prompt_ids), params=params
        )
        self._next_id += 1
        self._waiting.append(sequence)
        return sequence.request_id

    def check_request(self, prompt_ids: Seq[int], params: SamplingParams) -> None:
        """Refuses what can never run.

        Raises:
            RequestError: see `submit`.
        """
        check_request(prompt_ids, params, config=self.config, model=self.runner.manifest.config)

    def generate(self, prompts: Seq[Seq[int]], params: SamplingParams) -> list[Completion]:
        """Runs prompts to their end, in order; prompt i draws with seed + i.

        Raises:
            RequestError: one of them is refused; then none has been queued.
        """
        each = [replace(params, seed=(params.seed + index) % 2**32) for index in range(len(prompts))]
        for prompt, own in zip(prompts, each, strict=True):
            self.check_request(prompt, own)
        for prompt, own in zip(prompts, each, strict=True):
            self.submit(prompt, own)
        return self.run()

    def run(self) -> list[Completion]:
        """Runs until every request is finished; completions come in order of submission.

        Raises:
            EngineError: the model produced logits that are not finite, or the pool lost count.
        """
        finished: list[Completion] = []
        while self._waiting or self._running:
            finished.extend(self.step())
        self.check_idle()
        return sorted(finished, key=lambda completion: completion.request_id)

    def step(self) -> list[Completion]:
        """Admits what fits, runs one step, and returns the requests that it finished."""
        self._admit()
        decision = schedule(self._running, self.config, self.runner.shards)
        if decision is None:
            raise EngineError("requests wait, none can be admitted and none is running")
        zero = self._allocate(decision)
        rows = [
            RowInput(
                shard=row.shard,
                row=row.row,
                token_ids=row.sequence.tokens[row.sequence.computed : row.sequence.computed + row.count],
                start=row.sequence.computed,
                pages=row.sequence.pages,
            )
            for row in decision.rows
        ]
        batch = build_batch(
            decision.layout,
            rows,
            zero,
            config=self.config,
            shards=self.runner.shards,
            vocab=self.runner.manifest.config.vocab,
        )
        result = self.runner.generate(decision.layout, batch, self._sampling(decision))
        self.steps += 1
        finished = []
        for row in decision.rows:
            sequence = row.sequence
            samples = row.samples
            sequence.computed += row.count
            if not samples:
                continue
            if not result.finite[row.shard, row.row]:
                raise EngineError(
                    f"request {sequence.request_id}: logits at position {sequence.computed} are not finite"
                )
            self._accept(sequence, int(result.tokens[row.shard, row.row]))
            if sequence.finish_reason is not None:
                finished.append(self._finish(sequence))
        return finished

    def _admit(self) -> None:
        while self._waiting:
            counts = [0] * self.runner.shards
            for sequence in self._running:
                counts[sequence.shard] += 1
            first = self._waiting[0]
            shard = place(first, [pool.available for pool in self._pools], counts, self.config)
            if shard is None:
                return
            first.shard = shard
            self._pools[shard].reserve(-(-first.most_tokens // self.config.page_size))
            self._running.append(self._waiting.popleft())

    def _allocate(self, decision: Decision) -> list[list[int]]:
        zero: list[list[int]] = [[] for _ in self._pools]
        for row in decision.rows:
            sequence = row.sequence
            need = -(-(sequence.computed + row.count) // self.config.page_size) - len(sequence.pages)
            allocation = self._pools[row.shard].allocate(need)
            sequence.pages.extend(allocation.pages)
            zero[row.shard].extend(allocation.zero)
        return zero

    def _sampling(self, decision: Decision) -> SamplingBatch:
        rows = decision.layout.rows
        sampling = SamplingBatch.greedy(self.runner.shards * rows)
        for row in decision.rows:
            index, params = row.shard * rows + row.row, row.sequence.params
            sampling.temperature[index] = params.temperature
            sampling.top_k[index] = params.top_k
            sampling.top_p[index] = params.top_p
            sampling.seeds[index] = params.seed
            sampling.counters[index] = row.sequence.computed + row.count
        return sampling

    def _accept(self, sequence: Sequence, token: int) -> None:
        vocab = self.runner.manifest.config.vocab
        if not 0 <= token < vocab:
            raise EngineError(f"request {sequence.request_id}: sampled token {token} is not in 0..{vocab - 1}")
        if token in self._eos_ids and not sequence.params.ignore_eos:
            sequence.finish_reason = "stop"
            return
        sequence.tokens.append(token)
        if len(sequence.tokens) - sequence.prompt_length >= sequence.params.max_tokens:
            sequence.finish_reason = "length"

    def _finish(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None, "only finished sequences are released"
        reserved = -(-sequence.most_tokens // self.config.page_size) - len(sequence.pages)
        self._pools[sequence.shard].release(sequence.pages, reserved)
        self._running.remove(sequence)
        sequence.pages = []
        if self._poison:
            self._poison_free_pages()
        return Completion(
            request_id=sequence.request_id,
            prompt_ids=tuple(sequence.tokens[: sequence.prompt_length]),
            token_ids=tuple(sequence.tokens[sequence.prompt_length :]),
            finish_reason=sequence.finish_reason,
        )

    def _poison_free_pages(self) -> None:
        self.runner.poison([pool.free_pages() for pool in self._pools])

    def check_idle(self) -> None:
        """Checks that no page is lost or owned twice.

        Raises:
            EngineError: the pool is inconsistent.
        """
        for shard, pool in enumerate(self._pools):
            pool.check_integrity(page for s in self._running if s.shard == shard for page in s.pages)
