"""Runs an analysis: one float pass over the layers, each beside what candidate schemes would cost it.

The result does not depend on the number of devices: a sample, or an expert, is measured alone by one program, and sums
over them run on the host in a fixed order.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import jax

import jaxmoe
from jaxmoe.errors import RecipeError
from jaxmoe.nn.param import Role
from jaxmoe.ptq.actions import Action, Clean, Context, Embed, Join, PlanLayer, Record
from jaxmoe.ptq.calib import Calibration
from jaxmoe.ptq.graph import Planned, expert_bounds, planned, some_cells
from jaxmoe.ptq.job import Job, Part, is_routed, make_job, tap_of_match
from jaxmoe.ptq.layer_files import attended_key, expert_key, plan_key, sample_key, stats_key
from jaxmoe.ptq.recipe import FLOAT, CalibrationRecipe, Recipe, Rule
from jaxmoe.ptq.sensitivity.actions import (
    Measure,
    Observe,
    ObserveExperts,
    Probe,
    experts_key,
    measure_key,
    probe_key,
    seen_key,
)
from jaxmoe.ptq.sensitivity.measure import Schemes
from jaxmoe.ptq.sensitivity.summary import LINEAR_METRICS, Summarise
from jaxmoe.ptq.tasks.run import Summary, run_tasks
from jaxmoe.ptq.tasks.task import Task
from jaxmoe.ptq.work import WorkFolder
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.cells import cell_shape
from jaxmoe.weights.formats import FLOAT_ROLES
from jaxmoe.weights.load import ModelFiles
from jaxmoe.weights.shards import ShardFiles

PROTECTED: Final = FLOAT_ROLES | {
    "attention.q",
    "attention.k",
    "attention.q_a",
    "attention.q_b",
    "attention.kv_a",
    "indexer.q",
    "indexer.k",
}
"""Roles that no suggestion quantises: what decides where attention and routing look, a small part of all bytes."""
DEFAULT_SCHEMES: Final = ("w8a8-channel", "w8a8-g128", "w4a8-g128", "w8a16-g128")


def float_job(files: ModelFiles) -> Job:
    """A job that quantises nothing, which is what the float pass needs.

    Raises:
        ConfigError: the source has integers already.
    """
    present = {entry.role for entry in files.manifest.entries}
    roles = tuple(role for role in get_args(Role) if role in present)
    rule = Rule(roles=roles, scheme=FLOAT)
    return make_job(files, Recipe(name="analysis", rule=(rule,), calibration=CalibrationRecipe()))


def measured_parts(job: Job, layer: int) -> tuple[Part, ...]:
    """The layer's parameters outside the routed experts whose inputs the float pass sees, and that can be quantised."""
    return tuple(
        part
        for part in _parts_of(job, layer)
        if part.match.entry.role not in FLOAT_ROLES and tap_of_match(part.match, job.matches) is not None
    )


def check_schemes(job: Job, schemes: Sequence[Scheme]) -> None:
    """Refuses a scheme that cannot store some matrix that would be tried, before any work.

    Raises:
        RecipeError: the scheme and the tensor are named.
    """
    for part in job.parts:
        entry = part.match.entry
        if entry.role in FLOAT_ROLES:
            continue
        for scheme in schemes:
            try:
                scheme.values_shape(cell_shape(entry))
            except RecipeError as error:
                raise RecipeError(f"{part.tensors[0]}: {error}; leave {scheme.name} out of --schemes") from error


def analyze(
    job: Job,
    calibration: Calibration,
    schemes: Sequence[Scheme],
    *,
    work: Path,
    devices: Sequence[Any] = (),
    progress: Callable[[float, float, str], None] | None = None,
) -> tuple[dict[str, Any], Summary]:
    """The object of analysis.json, and how the run went.

    Args:
        job: of `float_job`.
        calibration: samples.
        schemes: candidates.
        work: empty folder for intermediate results.
        devices: that work; the first one if none are given. Any number gives the same result.
        progress: called after each task with (work done, work in all, the task).

    Raises:
        RecipeError: see `check_schemes`.
        WeightsError: what a layer makes of the samples is not finite, or the disk fails.
    """
    check_schemes(job, schemes)
    shards = ShardFiles(work, (), (), job.output.index_name)
    context = Context(job=job, shards=shards, work=WorkFolder(work), calibration=calibration, grams=frozenset())
    graph = list(_graph(context, tuple(schemes)))
    actions = {each.task.name: each.action for each in graph}
    records: dict[str, Record] = {}
    total = sum(each.task.cost for each in graph)
    done = [0.0]

    def execute(task: Task, device: Any) -> None:
        records[task.name] = actions[task.name].run(context, device)

    def on_done(task: Task, _seconds: float) -> None:
        done[0] += task.cost
        if progress is not None:
            progress(done[0], total, task.name)

    workers = list(devices) or jax.devices()[:1]
    shared_cores = all(device.platform == "cpu" for device in workers)
    summary = run_tasks([each.task for each in graph], execute, workers, on_done=on_done, shared_cores=shared_cores)
    layers = [records[f"layer {layer} summarise"] for layer in range(job.files.manifest.config.layers)]
    return _result(job, calibration, schemes, layers), summary


def ranking(result: dict[str, Any]) -> dict[str, list[str]]:
    """Metric -> names, the most sensitive first: linear layers as 'layers.3.experts.down', layers as 'layers.3'."""
    linears, layers = result["linears"], result["layers"]
    rankings = {}
    for metric in LINEAR_METRICS:
        rankings[metric] = _ranked([(f"layers.{row['layer']}.{row['role']}", row[metric]) for row in linears])
    for scheme in result["schemes"]:
        named = [(f"layers.{row['layer']}.{row['role']}", row["error"][scheme]) for row in linears]
        rankings[f"error {scheme}"] = _ranked(named)
        rankings[f"mse {scheme}"] = _ranked([(f"layers.{row['layer']}", row["mse"][scheme]) for row in layers])
    return rankings


def _ranked(named: Sequence[tuple[str, float | None]]) -> list[str]:
    """By value, the largest first; equals stay in order, and what has no value comes last."""
    return [name for name, _ in sorted(named, key=lambda item: math.inf if item[1] is None else -item[1])]


def _result(job: Job, calibration: Calibration, schemes: Sequence[Scheme], layers: list[Record]) -> dict[str, Any]:
    config = job.files.folder / "config.json"
    result: dict[str, Any] = {
        "jaxmoe": jaxmoe.__version__,
        "source": {
            "family": job.files.manifest.config.family,
            "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest(),
        },
        "calibration": {
            "data_sha256": calibration.data_sha256,
            "samples": len(calibration.lengths),
            "tokens": int(calibration.lengths.sum()),
        },
        "schemes": [scheme.name for scheme in schemes],
        "linears": [row for record in layers for row in record["linears"]],
        "layers": [record["layer"] for record in layers],
        "not_measured": _not_measured(job),
    }
    return {**result, "ranking": ranking(result)}


def _not_measured(job: Job) -> list[str]:
    """Roles that could be quantised and whose inputs no layer of the float pass shows."""
    layers = range(job.files.manifest.config.layers)
    seen = {part.match.entry.role for layer in layers for part in measured_parts(job, layer)}
    seen |= {match.entry.role for match in job.matches if is_routed(match.entry)}
    return sorted({match.entry.role for match in job.matches} - FLOAT_ROLES - seen)


def _parts_of(job: Job, layer: int) -> list[Part]:
    stacks = ("dense", "moe", "indexer")
    return [p for p in job.parts if p.layer == layer and p.match.entry.path.partition(".")[0] in stacks]


def _graph(context: Context, schemes: Schemes) -> Iterator[Planned]:
    layers = context.job.files.manifest.config.layers
    for shard in context.used_shards:
        yield _task(f"embed {shard}", Embed(shard=shard), set(), {sample_key(0, shard)}, 1.0, 0)
    for layer in range(layers):
        yield from _layer_graph(context, schemes, layer, last=layer == layers - 1)


def _layer_graph(context: Context, schemes: Schemes, layer: int, *, last: bool) -> Iterator[Planned]:
    name, job, shards = f"layer {layer}", context.job, context.used_shards
    assert context.calibration is not None
    parts, alone = _parts_of(job, layer), measured_parts(job, layer)
    routed = [part for part in parts if is_routed(part.match.entry)]
    experts = len(routed[0].cells) if routed else 0
    taps = tuple(sorted({tap for part in alone if (tap := tap_of_match(part.match, job.matches)) is not None}))
    tokens = sum(sum(context.lengths_of(shard)) for shard in shards)
    size = float(sum(math.prod(cell_shape(part.match.entry)) for part in parts if not is_routed(part.match.entry)))
    tries = 2 * len(schemes)
    after = {sample_key(layer + 1, shard) for shard in shards}
    for shard in shards:
        writes = {attended_key(layer, shard)} if experts else {sample_key(layer + 1, shard)}
        writes |= {seen_key(layer, shard), stats_key(layer, shard)}
        cost = size * sum(context.lengths_of(shard))
        action = Observe(layer=layer, shard=shard, taps=taps)
        yield _task(f"{name} observe {shard}", action, {sample_key(layer, shard)}, writes, cost, layer)
    seen = {seen_key(layer, shard) for shard in shards}
    left = set(seen)
    for part in alone:
        key, cost = measure_key(layer, part.name), 256.0 * tries * math.prod(cell_shape(part.match.entry))
        measure = Measure(layer=layer, part=part, schemes=schemes)
        yield _task(f"{name} measure {part.name}", measure, seen, {key}, cost, layer)
        left.add(key)
    probe = Probe(
        layer=layer,
        chosen=frozenset(part.name for part in alone if part.match.entry.role not in PROTECTED),
        schemes=schemes,
    )
    cost = size * tries * context.calibration.tokens.shape[1]
    yield _task(f"{name} probe", probe, {sample_key(layer, shards[0])}, {probe_key(layer)}, cost, layer)
    left.add(probe_key(layer))
    bounds = list(expert_bounds(experts))
    if experts:
        plan = PlanLayer(layer=layer, parts=tuple(parts), scans=(), experts=experts)
        reads = {attended_key(layer, shard) for shard in shards} | {stats_key(layer, shard) for shard in shards}
        yield _task(f"{name} plan", plan, reads, {plan_key(layer)}, 1.0, layer)
    for first, stop in bounds:
        some = tuple(some_cells(part, first, stop) for part in routed)
        observe = ObserveExperts(layer=layer, first=first, stop=stop, parts=some, keeps=not last, schemes=schemes)
        elements = sum(len(part.cells) * math.prod(cell_shape(part.match.entry)) for part in some)
        cost = elements * (tokens * job.files.manifest.config.moe.router.top_k / experts + 64.0 * tries)
        outputs = set() if last else {expert_key(layer, expert) for expert in range(first, stop)}
        writes = {experts_key(layer, first)} | outputs
        yield _task(f"{name} experts {first}-{stop - 1}", observe, {plan_key(layer)}, writes, cost, layer)
        left.add(experts_key(layer, first))
    if experts and not last:
        outputs = {expert_key(layer, expert) for expert in range(experts)}
        for shard in shards:
            join = Join(layer=layer, shard=shard)
            yield _task(f"{name} join {shard}", join, outputs, {sample_key(layer + 1, shard)}, 1.0, layer)
    summarise = Summarise(
        layer=layer, alone=alone, routed=tuple(routed), firsts=tuple(first for first, _ in bounds), schemes=schemes
    )
    yield _task(f"{name} summarise", summarise, left, set(), 1.0, layer)
    read = {f"done {name} summarise"} | (after if not (last and experts) else set())
    yield _task(f"{name} clean", Clean(layer=layer), read, set(), 0.0, layer)


def _task(name: str, action: Action, reads: set[str], writes: set[str], cost: float, stage: int) -> Planned:
    return planned(name, action, reads=reads, writes=writes, cost=cost, stage=stage, content="analysis")
