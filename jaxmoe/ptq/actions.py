"""What the tasks of a quantisation do. Each may run again, anywhere, with the same result; all data go through files.

A layer of a calibrated quantisation is a small graph:

    x (by shard) -> Attend -> PlanLayer -> RunExperts (by experts) -> Join -> x of the next layer
                    Scan ------^      \\-> WritePart (by parameter)

Attend runs samples through all but the routed experts. PlanLayer adds up what was seen and decides on smoothing.
RunExperts reads each expert once: runs its tokens, treats, rounds and writes it. A quantisation without calibration is
WriteParts only.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.ptq.calib import VIRTUAL_SHARDS, Calibration
from jaxmoe.ptq.job import Job, Part, is_routed, needs_of, tap_of_match
from jaxmoe.ptq.layer_files import (
    attended_key,
    expert_key,
    load_samples,
    packed_stats,
    plan_key,
    scan_key,
    stats_key,
    stream_rows,
    stream_samples,
    treatment_of,
    unpacked_stats,
)
from jaxmoe.ptq.layer_run import Attended, LayerRunner, Sample, embed_samples, join_sample, load_layer
from jaxmoe.ptq.moments import moment_of, smoothed_moment, unit_moment
from jaxmoe.ptq.report import TensorReport
from jaxmoe.ptq.smooth import Treatment, column_max, layer_treatments
from jaxmoe.ptq.statistics import InputStats
from jaxmoe.ptq.work import WorkFolder
from jaxmoe.ptq.write_part import copy_tensor, no_moment, write_part
from jaxmoe.weights.cells import cell_shape
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.prefetch import prefetch
from jaxmoe.weights.shards import ShardFiles

Record = dict[str, Any]
"""What a finished task leaves for the report, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What tasks work with."""

    job: Job
    shards: ShardFiles
    work: WorkFolder
    calibration: Calibration | None
    grams: frozenset[str]
    """Taps whose Gram matrices some rounding needs."""
    _runners: dict[Any, tuple[int, LayerRunner]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def runner(self, layer: int, device: Any) -> LayerRunner:
        """The layer's weights on a device; the last one of each device is kept."""
        with self._lock:
            # A worker works on one layer at a time: the last one's weights go before the next ones come.
            kept = self._runners.pop(device, None)
            if kept is not None and kept[0] == layer:
                self._runners[device] = kept
                return kept[1]
        del kept
        assert self.calibration is not None
        manifest = self.job.files.manifest
        weights = load_layer(self.job.source, manifest, layer)
        width = self.calibration.tokens.shape[1]
        runner = LayerRunner(manifest.config, layer, weights, width=width, device=device, grams=self.grams)
        with self._lock:
            self._runners[device] = (layer, runner)
        return runner

    def samples_of(self, shard: int) -> range:
        """Numbers of a shard's samples."""
        assert self.calibration is not None and self.calibration.first == 0
        return range(shard, len(self.calibration.lengths), VIRTUAL_SHARDS)

    @property
    def used_shards(self) -> tuple[int, ...]:
        """Shards that have samples."""
        return tuple(shard for shard in range(VIRTUAL_SHARDS) if self.samples_of(shard))

    def lengths_of(self, shard: int) -> list[int]:
        """Tokens of each of a shard's samples."""
        assert self.calibration is not None
        return [int(self.calibration.lengths[index]) for index in self.samples_of(shard)]

    @property
    def token_starts(self) -> dict[int, int]:
        """Number of tokens in the shards before each."""
        starts, total = {}, 0
        for shard in self.used_shards:
            starts[shard] = total
            total += sum(self.lengths_of(shard))
        return starts


class Action(ABC):
    """What a task does."""

    __slots__ = ()

    @abstractmethod
    def run(self, context: Context, device: Any) -> Record:
        """Does it; what it wrote is durable when it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Action):
    """Token ids -> the residual stream before layer 0, of one shard."""

    shard: int

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        assert context.calibration is not None
        chosen = context.samples_of(self.shard)
        manifest = context.job.files.manifest
        tokens = context.calibration.tokens[list(chosen)]
        lengths = context.lengths_of(self.shard)
        samples = embed_samples(context.job.source, manifest, tokens, lengths)
        stream_samples(context.work, 0, self.shard, samples, lengths)
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(Action):
    """A shard's samples through a layer, up to the routed experts: all of a dense layer."""

    layer: int
    shard: int

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        runner, lengths = context.runner(self.layer, device), context.lengths_of(self.shard)
        samples = load_samples(context.work, self.layer, self.shard, lengths)
        total: dict[str, InputStats] = {}

        def halves() -> Iterator[Attended]:
            for sample in samples:
                half, stats = runner.attend(sample)
                if not all(np.isfinite(array).all() for array in (half.stream, half.normed) if array is not None):
                    raise WeightsError(
                        f"layer {self.layer} of the float model gives NaN or infinite values on the samples"
                    )
                for tap, each in stats.items():
                    total[tap] = total[tap].merge(each) if tap in total else each.widened()
                yield half

        if self.layer < context.job.files.manifest.config.dense_layers:
            after = (Sample(x=half.stream, selected=half.selected) for half in halves())
            stream_samples(context.work, self.layer + 1, self.shard, after, lengths)
        else:
            rows = ({f.name: getattr(half, f.name) for f in fields(Attended)} for half in halves())
            stream_rows(context.work, attended_key(self.layer, self.shard), rows, lengths)
        context.work.save(stats_key(self.layer, self.shard), packed_stats(total))
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan(Action):
    """Largest magnitude of each column of some experts' gate and up projections, for smoothing."""

    layer: int
    first: int
    parts: tuple[Part, ...]
    """The quantised ones of gate and up, these experts only."""

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        tops = {}
        for part in self.parts:
            whole = tuple(slice(0, size) for size in cell_shape(part.match.entry))
            entry, source = part.match.entry, context.job.source
            columns = [column_max(source.read(entry, hub, whole).astype(np.float32)) for hub, _ in part.cells]
            tops[part.name] = np.maximum.reduce(columns)
        context.work.save(scan_key(self.layer, self.first), tops)
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLayer(Action):
    """Adds up a layer's statistics, decides on smoothing, sorts the (token, expert) pairs by expert."""

    layer: int
    parts: tuple[Part, ...]
    """All parameters of the layer."""
    scans: tuple[int, ...]
    """First experts of the layer's scans."""
    experts: int
    """Routed experts; 0: a dense layer."""

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        # The experts of this layer run now; what the next one needs first is read meanwhile.
        prefetch(context.job.source_tensors(self.layer + 1))
        shards, work = context.used_shards, context.work
        by_shard = [unpacked_stats(work.load(stats_key(self.layer, shard))) for shard in shards]
        stats = {tap: InputStats.merge_all(each[tap] for each in by_shard) for tap in by_shard[0]}
        plan: dict[str, np.ndarray] = packed_stats(stats)
        for name, treatment in self._treatments(context, stats).items():
            plan |= {f"treatment:{name}:{side}": array for side, array in treatment.arrays().items()}
        counts = None
        if self.experts:
            ids = np.concatenate([work.array(attended_key(self.layer, shard), "ids") for shard in shards])
            flat = ids.reshape(-1)
            pairs = np.argsort(flat, kind="stable")
            counts = np.bincount(flat, minlength=self.experts)
            places = np.empty_like(pairs)
            places[pairs] = np.arange(len(pairs))
            plan |= {"pairs": pairs, "places": places, "first": np.concatenate([[0], np.cumsum(counts)])}
        work.save(plan_key(self.layer), plan)
        return {} if counts is None else {"layer": self.layer, "tokens_per_expert": counts.tolist()}

    def _treatments(self, context: Context, stats: Mapping[str, InputStats]) -> dict[str, Treatment]:
        recipe = context.job.recipe.calibration
        if recipe is None or recipe.smooth is None:
            return {}
        alphas, columns = {}, {}
        for part in self.parts:
            alpha = None if part.match.scheme is None else recipe.alpha(part.match.scheme)
            if alpha is None:
                continue
            alphas[part.name] = alpha
            if is_routed(part.match.entry):
                continue
            hub = part.cells[0][0]
            whole = tuple(slice(0, size) for size in cell_shape(part.match.entry))
            weight = context.job.source.read(part.match.entry, hub, whole)
            columns[part.name] = column_max(weight.astype(np.float32))
        for first in self.scans:
            for name, top in context.work.load(scan_key(self.layer, first)).items():
                columns[name] = np.maximum(columns[name], top) if name in columns else np.asarray(top)
        return layer_treatments(
            context.job.files.manifest.config,
            columns,
            frozenset(part.name for part in self.parts),
            stats,
            alphas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Action):
    """Attention's stream and what the experts made of it -> the residual stream before the next layer, of one shard."""

    layer: int
    shard: int

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        assert context.calibration is not None
        arrays, plan = context.work.load(attended_key(self.layer, self.shard)), context.work.load(plan_key(self.layer))
        ids, first = np.asarray(arrays["ids"]), np.asarray(plan["first"])
        start = context.token_starts[self.shard] * ids.shape[1]
        rank = np.asarray(plan["places"][start : start + ids.size]).reshape(ids.shape) - first[ids]
        width, lengths = context.calibration.tokens.shape[1], context.lengths_of(self.shard)
        outputs = {
            expert: context.work.array(expert_key(self.layer, expert), "out") for expert in np.unique(ids).tolist()
        }

        def samples() -> Iterator[Sample]:
            begin = 0
            for index, length in enumerate(lengths):
                part = slice(begin, begin + length)
                rows = np.empty((*ids[part].shape, arrays["normed"].shape[-1]), np.float32)
                for expert in np.unique(ids[part]).tolist():
                    chosen = ids[part] == expert
                    rows[chosen] = outputs[expert][rank[part][chosen]]
                half = Attended(
                    **{name: np.asarray(array[part]) for name, array in arrays.items() if name != "selected"},
                    selected=np.asarray(arrays["selected"][index]) if "selected" in arrays else None,
                )
                x = join_sample(half, rows, width=width, device=device)
                if not np.isfinite(x).all():
                    raise WeightsError(
                        f"layer {self.layer} of the float model gives NaN or infinite values on the samples"
                    )
                yield Sample(x=x, selected=half.selected)
                begin += length

        stream_samples(context.work, self.layer + 1, self.shard, samples(), lengths)
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePart(Action):
    """Rounds and writes, or copies, one parameter of one layer (or some of its experts)."""

    part: Part
    planned: int | None
    """The layer whose plan says how; None: nothing is known of it."""

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        job, part = context.job, self.part
        treatment, moments = Treatment(), no_moment
        if self.planned is not None:
            plan = context.work.load(plan_key(self.planned))
            treatment = treatment_of(plan, part.name)
            tap = tap_of_match(part.match, job.matches)
            needs = needs_of(part.match)
            if needs != "nothing" and tap is not None:
                moment = moment_of(unpacked_stats(plan)[tap], needs)
                assert moment is not None
                known = unit_moment(smoothed_moment(moment, treatment))
                moments = lambda _: known  # noqa: E731
        reports = write_part(job, context.shards, part, treatment=treatment, moments=moments, device=device)
        context.shards.make_durable(spec.name for spec in part.specs(job))
        return {"tensors": [asdict(report) for report in reports]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTensor(Action):
    """Copies a tensor that no parameter needs."""

    meta: TensorMeta

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        copy_tensor(context.job, self.meta, context.shards)
        context.shards.make_durable([self.meta.name])
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean(Action):
    """Removes what nobody reads any more of a layer that is done."""

    layer: int

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        context.work.remove(f"layer-{self.layer:05}")
        context.work.remove(f"x-{self.layer:05}")
        return {}


def tensor_reports(records: Sequence[Record]) -> list[TensorReport]:
    """The tensors that tasks wrote, in the order of the records."""
    return [TensorReport(**tensor) for record in records for tensor in record.get("tensors", ())]
