"""Perplexity through the serving path: paged cache, chunked prefill, compiled steps, on the mesh.

A baseline runs on the same windows at the same time, so that the divergence of whole distributions and the agreement
of routing are measured without storing logits.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.engine.batch import RowInput, build_batch
from jaxmoe.engine.compile_watch import CompileWatch
from jaxmoe.engine.runner import Evaluated, Runner
from jaxmoe.errors import ConfigError, EngineError
from jaxmoe.nn.step import Layout, StepBatch

RANGES: Final[tuple[tuple[int, int | None], ...]] = ((0, 512), (512, 1024), (1024, 2048), (2048, None))
"""Position ranges of the predicting token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResult:
    """Quality over the predictions made at positions start..stop-1."""

    start: int
    stop: int | None
    tokens: int
    perplexity: float
    baseline_perplexity: float | None
    standard_error: float | None
    """Of the relative increase, from the paired differences per token."""
    kl: float | None
    """Mean KL divergence baseline || model, in nats."""

    @property
    def increase(self) -> float | None:
        """Relative increase of perplexity over the baseline."""
        return None if self.baseline_perplexity is None else self.perplexity / self.baseline_perplexity - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Result of an evaluation."""

    overall: RangeResult
    ranges: tuple[RangeResult, ...]
    router_agreement: float | None
    """Mean share of a token's experts that both models choose."""
    router_agreement_worst_layer: float | None
    windows: int
    window_tokens: int


class Evaluator:
    """Feeds windows to a model, and to a baseline if there is one."""

    def __init__(self, runner: Runner, baseline: Runner | None = None, *, rows: int, chunk: int):
        """Args: rows: windows a device holds at once; chunk: tokens of one step and window."""
        self._runners = [runner] if baseline is None else [runner, baseline]
        self.layout = Layout(rows=rows, chunk=chunk, all_logits=True)
        if baseline is not None and baseline.shards != runner.shards:
            raise ConfigError(f"model on {runner.shards} devices, baseline on {baseline.shards}")
        self._compare: Callable[..., Any] = _not_warm
        self._watch = CompileWatch()
        self._compiles_at_ready = 0
        vocabularies = {r.manifest.config.vocab for r in self._runners}
        if len(vocabularies) != 1:
            raise ConfigError(f"model and baseline have different vocabularies: {sorted(vocabularies)}")

    @property
    def runner(self) -> Runner:
        """The model's runner; its pages are free again after `run`."""
        return self._runners[0]

    def warm_up(self) -> None:
        """Compiles what the evaluation needs; `run` compiles nothing."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda runner: runner.compile([self.layout]), self._runners))
        abstract = [runner.abstract_evaluated(self.layout) for runner in self._runners]
        targets = self._runners[0].abstract_tokens(self.layout)
        self._compare = jax.jit(_compare).lower(abstract[0], abstract[-1], targets).compile()
        self._compiles_at_ready = self._watch.count

    @property
    def compilations_after_warm_up(self) -> int:
        """Compilations of the process since `warm_up` ended."""
        return self._watch.count - self._compiles_at_ready

    def run(self, windows: np.ndarray, progress: Callable[[int, int], None] | None = None) -> EvalResult:
        """Evaluates windows [count, length + 1].

        Args:
            windows: token ids; the last column is only predicted.
            progress: called with (tokens done, tokens in all).

        Raises:
            ConfigError: a window does not fit the context.
            EngineError: the logits are not finite.
        """
        count, length = windows.shape[0], windows.shape[1] - 1
        runner = self._runners[0]
        for each in self._runners:
            pages = each.config.pages - 1
            need = -(-length // each.config.page_size)
            if length > each.config.max_context_tokens or need * self.layout.rows > pages:
                raise ConfigError(
                    f"windows of {length} tokens need {need} pages each, {self.layout.rows} a device; the pool has "
                    f"{pages} and a context {each.config.max_context_tokens}"
                )
        at_once = runner.shards * self.layout.rows
        nll, kl = np.full((2, count, length), np.nan), np.full((count, length), np.nan)
        agreement: list[np.ndarray] = []
        for first in range(0, count, at_once):
            group = windows[first : first + at_once]
            for start in range(0, length, self.layout.chunk):
                span = slice(start, min(start + self.layout.chunk, length))
                targets = self._targets(group, span)
                results = [self._step(each, group, span) for each in self._runners]
                values = self._compare(results[0], results[-1], runner.put_tokens(targets))
                part = (slice(first, first + len(group)), span)
                width = span.stop - span.start
                for index, out in enumerate((nll[0], nll[1], kl)):
                    out[part] = self._rows(values[index], len(group), width)
                agreement.append(np.asarray(values[3]))
                # Both models' logits: they must not lie beside those of the next step.
                del results
                if progress is not None:
                    progress(first * length + len(group) * span.stop, count * length)
        if not np.isfinite(nll[0]).all():
            raise EngineError("the model's logits are not finite")
        return self._summary(nll, kl, agreement, count, length)

    def _targets(self, group: np.ndarray, span: slice) -> np.ndarray:
        targets = np.full((self._runners[0].shards * self.layout.rows, self.layout.chunk), -1, np.int32)
        targets[: len(group), : span.stop - span.start] = group[:, span.start + 1 : span.stop + 1]
        return targets.reshape(-1)

    def _rows(self, values: jax.Array, count: int, width: int) -> np.ndarray:
        return np.asarray(values).reshape(-1, self.layout.chunk)[:count, :width]

    def _step(self, runner: Runner, group: np.ndarray, span: slice) -> Evaluated:
        return runner.evaluate(self.layout, self._batch(runner, group, span))

    def _batch(self, runner: Runner, group: np.ndarray, span: slice) -> StepBatch:
        """Window i lives on device i // rows and owns a fixed run of that device's pages."""
        size, rows = runner.config.page_size, self.layout.rows
        width = runner.config.table_width
        held, fresh = -(-span.stop // size), -(-span.start // size)
        inputs, zero = [], [[] for _ in range(runner.shards)]
        for index, tokens in enumerate(group):
            shard, row = divmod(index, rows)
            first_page = 1 + row * min(width, (runner.config.pages - 1) // rows)
            pages = list(range(first_page, first_page + held))
            zero[shard].extend(pages[fresh:])
            inputs.append(
                RowInput(shard=shard, row=row, token_ids=tokens[span].tolist(), start=span.start, pages=pages)
            )
        vocab = runner.manifest.config.vocab
        return build_batch(self.layout, inputs, zero, config=runner.config, shards=runner.shards, vocab=vocab)

    def _summary(
        self, nll: np.ndarray, kl: np.ndarray, agreement: list[np.ndarray], count: int, length: int
    ) -> EvalResult:
        paired = len(self._runners) == 2
        overall = _range_result(nll, kl, 0, None, paired=paired)
        ranges = tuple(_range_result(nll, kl, a, b, paired=paired) for a, b in RANGES if a < length)
        layers = np.sum(agreement, axis=0)
        shares = layers[:, 0] / layers[:, 1]
        return EvalResult(
            overall=overall,
            ranges=ranges,
            router_agreement=float(shares.mean()) if paired else None,
            router_agreement_worst_layer=float(shares.min()) if paired else None,
            windows=count,
            window_tokens=length,
        )


def _not_warm(*_args: object) -> None:
    raise EngineError("call warm_up before run")


def _compare(
    model: Evaluated, baseline: Evaluated, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Per token: nll of model and baseline, KL(baseline || model); per layer: (agreeing, chosen) experts."""
    # Sums over the vocabulary only: log-probabilities of all tokens would be two more arrays as large as the logits.
    total, total_base = (jax.nn.logsumexp(each.logits, axis=-1) for each in (model, baseline))
    index = jnp.maximum(targets, 0)[:, None]
    nll = total - jnp.take_along_axis(model.logits, index, axis=-1)[:, 0]
    nll_base = total_base - jnp.take_along_axis(baseline.logits, index, axis=-1)[:, 0]
    share = jnp.exp(baseline.logits - total_base[:, None])
    kl = jnp.sum(share * (baseline.logits - model.logits), axis=-1) + total - total_base
    real = (targets >= 0)[None, :, None]
    same = jnp.any(model.expert_ids[..., :, None] == baseline.expert_ids[..., None, :], axis=-1)
    chosen = jnp.sum(jnp.broadcast_to(real, same.shape), axis=(1, 2)).astype(jnp.float32)
    agreeing = jnp.sum(same & real, axis=(1, 2)).astype(jnp.float32)
    return nll, nll_base, kl, jnp.stack([agreeing, chosen], axis=1)


def _range_result(nll: np.ndarray, kl: np.ndarray, start: int, stop: int | None, *, paired: bool) -> RangeResult:
    own, base, divergence = nll[0][:, start:stop], nll[1][:, start:stop], kl[:, start:stop]
    difference = own - base
    mean = float(difference.mean())
    error = float(difference.std() / math.sqrt(difference.size)) * math.exp(mean)
    return RangeResult(
        start=start,
        stop=stop,
        tokens=own.size,
        perplexity=math.exp(own.mean()),
        baseline_perplexity=math.exp(base.mean()) if paired else None,
        standard_error=error if paired else None,
        kl=float(divergence.mean()) if paired else None,
    )
