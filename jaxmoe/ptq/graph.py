"""The tasks of a quantisation: which there are, what they read and write, what they cost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmoe.ptq.actions import Action, Attend, Clean, Context, CopyTensor, Embed, Join, PlanLayer, Scan, WritePart
from jaxmoe.ptq.expert_action import RunExperts
from jaxmoe.ptq.job import Job, Part, is_routed, is_run, needs_of
from jaxmoe.ptq.layer_files import attended_key, expert_key, plan_key, sample_key, scan_key
from jaxmoe.ptq.layer_run import layer_place
from jaxmoe.ptq.tasks.task import Task
from jaxmoe.weights.cells import cell_shape

MOST_EXPERT_TASKS = 64
"""Tasks that the experts of a layer make at most: enough for any number of devices that share one queue."""

_ROUND_COST = {"nothing": 30, "importance": 1000, "hessian": 1000}
"""Operations an element, roughly: what matters is which task is longer."""
_LEARNED_PRODUCTS = 110
"""Products of a weight with a matrix of its inputs, of learned rounding with its defaults; gptq makes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A task and what it does."""

    task: Task
    action: Action


def planned(
    name: str, action: Action, *, reads: set[str], writes: set[str], cost: float, stage: int, content: str
) -> Planned:
    """A task of an action, which also writes 'done' and its name; see `Task`."""
    task = Task(
        name=name,
        reads=frozenset(reads),
        writes=frozenset(writes | {f"done {name}"}),
        cost=cost,
        stage=stage,
        content=content,
    )
    return Planned(task=task, action=action)


def build_graph(context: Context, fingerprint: str, *, writes: bool = True) -> list[Planned]:
    """All tasks of a quantisation, in the order of the layers.

    Args:
        context: of the run.
        fingerprint: of the job: what a task does depends on it and on the task's name.
        writes: whether anything is rounded and written; if not, samples only run through the model.
    """
    job, config = context.job, context.job.files.manifest.config
    layers = config.layers if context.calibration is not None else 0
    run = [part for part in job.parts if _calibrated(job, part, layers)]
    others = [part for part in job.parts if not _calibrated(job, part, layers)]
    graph = _Graph(context=context, fingerprint=fingerprint, writes=writes)
    tasks = list(graph.start()) if layers else []
    for layer in range(layers):
        tasks.extend(graph.layer(layer, [part for part in run if _at(job, part, layer)], last=layer == layers - 1))
    if not writes:
        return tasks
    for part in others:
        tasks.extend(graph.write(piece, planned=None, stage=layers + 1) for piece in _pieces(part))
    tasks.extend(graph.copies(stage=layers + 1))
    return tasks


def _calibrated(job: Job, part: Part, layers: int) -> bool:
    return layers > 0 and is_run(part.match.entry)


def _at(job: Job, part: Part, layer: int) -> bool:
    places = layer_place(job.files.manifest.config, layer)
    return places.get(part.match.entry.path.partition(".")[0]) == part.cells[0][0].position[0]


def _pieces(part: Part) -> Iterator[Part]:
    """A part in pieces of some experts, of similar size."""
    count = len(part.cells)
    pieces = min(count, MOST_EXPERT_TASKS)
    for index in range(pieces):
        cells = part.cells[index * count // pieces : (index + 1) * count // pieces]
        yield Part(match=part.match, layer=part.layer, cells=cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    context: Context
    fingerprint: str
    writes: bool

    def task(self, name: str, action: Action, *, reads: set[str], writes: set[str], cost: float, stage: int) -> Planned:
        return planned(name, action, reads=reads, writes=writes, cost=cost, stage=stage, content=self.fingerprint)

    def start(self) -> Iterator[Planned]:
        for shard in self.context.used_shards:
            action = Embed(shard=shard)
            yield self.task(f"embed {shard}", action, reads=set(), writes={sample_key(0, shard)}, cost=1.0, stage=0)

    def layer(self, layer: int, parts: list[Part], *, last: bool) -> Iterator[Planned]:
        context, job, name = self.context, self.context.job, f"layer {layer}"
        routed = [part for part in parts if is_routed(part.match.entry)]
        alone = [part for part in parts if not is_routed(part.match.entry)]
        experts, shards = len(routed[0].cells) if routed else 0, context.used_shards
        # Nobody is there to read what the last layer's experts make of their tokens.
        runs_experts = self.writes or not last
        attention_cost = 2.0 * sum(math.prod(cell_shape(part.match.entry)) for part in alone)
        for shard in shards:
            yield self.task(
                f"{name} attend {shard}",
                Attend(layer=layer, shard=shard),
                reads={sample_key(layer, shard)},
                writes={attended_key(layer, shard)} | ({sample_key(layer + 1, shard)} if not experts else set()),
                cost=attention_cost * sum(context.lengths_of(shard)),
                stage=layer,
            )
        scanned = self._scanned(routed)
        bounds = list(expert_bounds(experts))
        for first, stop in bounds if scanned else ():
            some = tuple(some_cells(part, first, stop) for part in scanned)
            yield self.task(
                f"{name} scan {first}-{stop - 1}",
                Scan(layer=layer, first=first, parts=some),
                reads=set(),
                writes={scan_key(layer, first)},
                cost=float(sum(_elements(part) for part in some)),
                stage=layer,
            )
        scans = tuple(first for first, _ in bounds) if scanned else ()
        yield self.task(
            f"{name} plan",
            PlanLayer(layer=layer, parts=tuple(parts), scans=scans, experts=experts),
            reads={attended_key(layer, shard) for shard in shards} | {scan_key(layer, first) for first in scans},
            writes={plan_key(layer)},
            cost=1.0,
            stage=layer,
        )
        for part in alone if self.writes else ():
            yield self.write(part, planned=layer, stage=layer)
        for first, stop in bounds if runs_experts else ():
            some = tuple(some_cells(part, first, stop) for part in routed)
            tokens = sum(sum(context.lengths_of(shard)) for shard in shards)
            rate = tokens * job.files.manifest.config.moe.router.top_k / experts
            yield self.task(
                f"{name} experts {first}-{stop - 1}",
                RunExperts(layer=layer, first=first, stop=stop, parts=some, writes=self.writes, keeps=not last),
                reads={plan_key(layer)},
                writes=set() if last else {expert_key(layer, expert) for expert in range(first, stop)},
                cost=sum(_elements(part) * 2.0 * rate + _rounding_cost(part) for part in some),
                stage=layer,
            )
        if experts and not last:
            for shard in shards:
                yield self.task(
                    f"{name} join {shard}",
                    Join(layer=layer, shard=shard),
                    reads={expert_key(layer, expert) for expert in range(experts)},
                    writes={sample_key(layer + 1, shard)},
                    cost=float(sum(context.lengths_of(shard))),
                    stage=layer,
                )
        after = {sample_key(layer + 1, shard) for shard in shards} if not (last and experts) else set()
        readers = {f"done {name} {_label(part)}" for part in alone if self.writes}
        readers |= {f"done {name} experts {first}-{stop - 1}" for first, stop in bounds if runs_experts}
        readers |= {f"done {name} plan"}
        clean = Clean(layer=layer)
        yield self.task(f"{name} clean", clean, reads=after | readers, writes=set(), cost=0.0, stage=layer)

    def write(self, part: Part, *, planned: int | None, stage: int) -> Planned:
        place = f"layer {planned} {_label(part)}" if planned is not None else _label(part)
        action = WritePart(part=part, planned=planned)
        reads = {plan_key(planned)} if planned is not None else set[str]()
        return self.task(place, action, reads=reads, writes=set(), cost=_rounding_cost(part), stage=stage)

    def copies(self, *, stage: int) -> Iterator[Planned]:
        for meta in self.context.job.not_loaded:
            action = CopyTensor(meta=meta)
            cost = float(meta.nbytes)
            yield self.task(f"copy {meta.name}", action, reads=set(), writes=set(), cost=cost, stage=stage)

    def _scanned(self, routed: list[Part]) -> list[Part]:
        """The parts of routed experts that the smoothing of their common input looks at."""
        recipe = self.context.job.recipe.calibration
        if recipe is None or recipe.smooth is None:
            return []
        return [part for part in routed if part.name in ("ffn.gate", "ffn.up") and part.match.scheme is not None]


def expert_bounds(experts: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of each task's experts: contiguous, as even as they can be."""
    tasks = min(experts, MOST_EXPERT_TASKS)
    for index in range(tasks):
        yield index * experts // tasks, (index + 1) * experts // tasks


def some_cells(part: Part, first: int, stop: int) -> Part:
    """Cells `first` to `stop` of a part."""
    return Part(match=part.match, layer=part.layer, cells=part.cells[first:stop])


def _elements(part: Part) -> int:
    return len(part.cells) * math.prod(cell_shape(part.match.entry))


def _rounding_cost(part: Part) -> float:
    if part.match.scheme is None:
        return float(_elements(part))
    needs, shape = needs_of(part.match), cell_shape(part.match.entry)
    cost = float(_ROUND_COST[needs] * _elements(part))
    if needs == "hessian":
        products = _LEARNED_PRODUCTS if part.match.rounding == "learned" else 1
        cost += len(part.cells) * (shape[-1] ** 3 / 3 + products * 2.0 * shape[0] * shape[1] ** 2)
    return cost


def _label(part: Part) -> str:
    """A name for a part that no other part has."""
    first, last = part.cells[0][1].label, part.cells[-1][1].label
    return first if first == last else f"{first} .. {last}"
