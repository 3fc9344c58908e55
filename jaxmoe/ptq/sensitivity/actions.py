"""What the tasks of an analysis do. The forward pass is the quantiser's own: Embed, PlanLayer, Join, Clean are its.

    x (by shard) -> Observe -> PlanLayer -> ObserveExperts (by experts) -> Join -> x of the next layer
                       \\-> Measure (by linear), Probe -> Summarise <--/

Nothing is rounded into a file. What is kept of the activations is bounded: `KEPT_ROWS` tokens of each tap, and
`EXPERT_ROWS` of each expert.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.ops.experts import Activation
from jaxmoe.ptq.actions import Action, Context, Record
from jaxmoe.ptq.expert_action import gather_rows
from jaxmoe.ptq.expert_run import run_expert
from jaxmoe.ptq.job import Part, tap_of_match
from jaxmoe.ptq.layer_files import (
    attended_key,
    expert_key,
    load_samples,
    packed_stats,
    plan_key,
    save_samples,
    stats_key,
)
from jaxmoe.ptq.layer_run import Sample, layer_config, load_layer
from jaxmoe.ptq.sensitivity.measure import (
    Schemes,
    expert_errors,
    layer_errors,
    layer_results,
    linear_errors,
    quantised_weights,
    watch_layer,
)
from jaxmoe.ptq.sensitivity.spread import Spread, rescaled
from jaxmoe.ptq.statistics import InputStats
from jaxmoe.weights.cells import cell_shape

KEPT_ROWS: Final = 256
"""Tokens of each tap that schemes are tried on, over all samples."""
EXPERT_ROWS: Final = 64
"""Tokens of each expert that schemes are tried on."""
PROJECTIONS: Final = ("gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisContext:
    """What the tasks of an analysis work with."""

    base: Context
    """The quantiser's, of a job that quantises nothing."""
    schemes: Schemes
    """Candidates."""
    _layers: dict[Any, tuple[int, dict[str, jax.Array]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def weights(self, layer: int, device: Any) -> dict[str, jax.Array]:
        """All but the routed experts of a layer on a device; the last layer of each device is kept."""
        with self._lock:
            kept = self._layers.get(device)
        if kept is not None and kept[0] == layer:
            return kept[1]
        job = self.base.job
        placed = jax.device_put(load_layer(job.source, job.files.manifest, layer), device)
        with self._lock:
            self._layers[device] = (layer, placed)
        return placed

    @property
    def width(self) -> int:
        """Tokens of a sample, padding included."""
        assert self.base.calibration is not None
        return self.base.calibration.tokens.shape[1]

    @property
    def kept_rows(self) -> int:
        """Tokens that are kept of each sample and tap."""
        assert self.base.calibration is not None
        return -(-KEPT_ROWS // len(self.base.calibration.lengths))


class Step(ABC):
    """What a task of an analysis does; it may run again, anywhere, with the same result."""

    __slots__ = ()

    @abstractmethod
    def run(self, context: AnalysisContext, device: Any) -> Record:
        """Does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe(Step):
    """A shard's samples through a layer, as `Attend` does it, and what its linear layers were fed."""

    layer: int
    shard: int
    taps: tuple[str, ...]

    def run(self, context: AnalysisContext, device: Any) -> Record:
        """See the class."""
        base, weights = context.base, context.weights(self.layer, device)
        config = layer_config(base.job.files.manifest.config, self.layer)
        halves, spreads, rows, cache, chosen = [], [], [], [], []
        for sample in load_samples(base.work, self.layer, self.shard, base.lengths_of(self.shard)):
            length = len(sample.x)
            results, selected, spread, kept, errors = watch_layer(
                config, context.width, self.taps, weights, *_placed(sample, context.width, device), context.kept_rows
            )
            half = {name: np.asarray(array)[:length] for name, array in results.items()}
            if not all(np.isfinite(half[name]).all() for name in ("stream", "normed") if name in half):
                raise WeightsError(f"layer {self.layer} of the float model gives NaN or infinite values on the samples")
            halves.append(half)
            chosen.append(None if selected is None else np.asarray(selected))
            spreads.append({name: rescaled(*each) for name, each in spread.items()})
            rows.append({name: np.asarray(array) for name, array in kept.items()})
            cache.append({name: np.asarray(sides, np.float64) for name, sides in errors.items()})
        self._save(context, spreads, rows, cache)
        if "normed" not in halves[0]:
            after = [Sample(x=half["stream"], selected=keys) for half, keys in zip(halves, chosen, strict=True)]
            save_samples(base.work, self.layer + 1, self.shard, after)
            return {}
        arrays: dict[str, np.ndarray | None] = {
            name: np.concatenate([half[name] for half in halves]) for name in halves[0]
        }
        arrays["selected"] = None if chosen[0] is None else np.stack([keys for keys in chosen if keys is not None])
        base.work.save(attended_key(self.layer, self.shard), arrays)
        return {}

    def _save(
        self,
        context: AnalysisContext,
        spreads: list[dict[str, Spread]],
        rows: list[dict[str, np.ndarray]],
        cache: list[dict[str, np.ndarray]],
    ) -> None:
        work = context.base.work
        seen: dict[str, np.ndarray | None] = {}
        for tap in self.taps:
            merged = Spread.merge_all(spread[tap] for spread in spreads)
            seen |= {f"spread:{tap}:{name}": array for name, array in merged.arrays().items()}
            seen[f"rows:{tap}"] = np.concatenate([kept[tap] for kept in rows])
        for table in cache[0]:
            seen[f"cache:{table}"] = np.add.reduce([errors[table] for errors in cache])
        work.save(seen_key(self.layer, self.shard), seen)
        # What PlanLayer adds up for smoothing, of which there is none here.
        nothing = InputStats(absmax=np.zeros(1, np.float32), squares=np.zeros(1), count=np.asarray(0))
        work.save(stats_key(self.layer, self.shard), packed_stats({"none": nothing}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Step):
    """What each scheme costs a linear layer outside the routed experts."""

    layer: int
    part: Part

    def run(self, context: AnalysisContext, device: Any) -> Record:
        """See the class."""
        base, match = context.base, self.part.match
        tap = tap_of_match(match, base.job.matches)
        assert tap is not None, match.entry.path
        rows = np.concatenate(
            [base.work.array(seen_key(self.layer, shard), f"rows:{tap}") for shard in base.used_shards]
        )
        weight = _read(base, self.part)
        errors = np.asarray(linear_errors(*jax.device_put((rows, weight), device), context.schemes), np.float64)
        base.work.save(measure_key(self.layer, self.part.name), {"errors": errors})
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Step):
    """What each scheme costs the layer outside its routed experts, and how it disturbs routing, on one sample."""

    layer: int
    chosen: frozenset[str]
    """Local names of the weights that are quantised."""

    def run(self, context: AnalysisContext, device: Any) -> Record:
        """See the class."""
        base, shard = context.base, context.base.used_shards[0]
        weights = context.weights(self.layer, device)
        config = layer_config(base.job.files.manifest.config, self.layer)
        sample = load_samples(base.work, self.layer, shard, base.lengths_of(shard))[0]
        placed = _placed(sample, context.width, device)
        exact = layer_results(config, context.width, weights, *placed)
        seen = []
        for scheme in context.schemes:
            quantised = quantised_weights(weights, self.chosen, scheme)
            results = layer_results(config, context.width, quantised, *placed)
            seen.append(layer_errors(results, exact, placed[1]))
        arrays = {name: np.stack([np.asarray(each[name]) for each in seen]) for name in seen[0]}
        base.work.save(probe_key(self.layer), {**arrays, "tokens": np.asarray(len(sample.x))})
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveExperts(Step):
    """Experts `first` to `stop`: their outputs for the next layer, and what each scheme costs them."""

    layer: int
    first: int
    stop: int
    parts: tuple[Part, ...]
    """The layer's expert parameters, these experts only."""
    keeps_output: bool

    def run(self, context: AnalysisContext, device: Any) -> Record:
        """See the class."""
        base = context.base
        plan = base.work.load(plan_key(self.layer))
        moe = base.job.files.manifest.config.moe
        activation = Activation(kind=moe.activation, limit=moe.limit)
        shares = _shares(base, plan, self.layer)
        columns: dict[str, list[np.ndarray]] = {"linear": [], "block": [], "tokens": [], "tried": []}
        spreads: dict[str, list[Spread]] = {"in": [], "hidden": []}
        for expert in range(self.first, self.stop):
            weights = {part.name.removeprefix("ffn."): _read(base, part, expert - self.first) for part in self.parts}
            rows = gather_rows(base, plan, self.layer, expert)
            if self.keeps_output:
                seen = run_expert(weights, rows, activation=activation, grams=frozenset(), device=device)
                if not np.isfinite(seen.out).all():
                    raise WeightsError(
                        f"layer {self.layer}, expert {expert} of the float model gives NaN or infinite values on the "
                        "samples"
                    )
                base.work.save(expert_key(self.layer, expert), {"out": seen.out})
            own = shares[plan["first"][expert] : plan["first"][expert + 1]]
            tried, share = _evenly(rows, own)
            result = expert_errors(*jax.device_put((weights, tried, share), device), activation, context.schemes)
            columns["linear"].append(np.asarray(result["linear"], np.float64))
            columns["block"].append(np.asarray(result["block"], np.float64))
            columns["tokens"].append(np.asarray(len(rows)))
            columns["tried"].append(np.asarray(min(len(rows), EXPERT_ROWS)))
            for name, each in result["spreads"].items():
                spreads[name].append(rescaled(*each))
        arrays = {name: np.stack(values) for name, values in columns.items()}
        for name, each in spreads.items():
            arrays |= {f"spread:{name}:{key}": array for key, array in Spread.merge_all(each).arrays().items()}
        base.work.save(experts_key(self.layer, self.first), arrays)
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Step):
    """A task of the quantiser as it is."""

    action: Action

    def run(self, context: AnalysisContext, device: Any) -> Record:
        """See the class."""
        return self.action.run(context.base, device)


def seen_key(layer: int, shard: int) -> str:
    """Spreads, rows and cache errors of a shard."""
    return f"layer-{layer:05}/seen-{shard:02}"


def measure_key(layer: int, name: str) -> str:
    """Errors of a linear layer."""
    return f"layer-{layer:05}/measure-{name}"


def probe_key(layer: int) -> str:
    """Errors of a layer."""
    return f"layer-{layer:05}/probe"


def experts_key(layer: int, first: int) -> str:
    """Errors and spreads of experts `first`.."""
    return f"layer-{layer:05}/observed-{first:05}"


def unpacked_spread(arrays: Mapping[str, np.ndarray], name: str) -> Spread:
    """One of the spreads among other arrays."""
    prefix = f"spread:{name}:"
    return Spread.from_arrays({key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)})


def _placed(sample: Sample, width: int, device: Any) -> tuple[Any, Any, Any]:
    x = np.zeros((width, *sample.x.shape[1:]), np.float32)
    x[: len(sample.x)] = sample.x
    return jax.device_put((x, np.int32(len(sample.x)), sample.selected), device)


def _read(context: Context, part: Part, index: int = 0) -> np.ndarray:
    whole = tuple(slice(0, size) for size in cell_shape(part.match.entry))
    return context.job.source.read(part.match.entry, part.cells[index][0], whole).astype(np.float32)


def _shares(context: Context, plan: Mapping[str, np.ndarray], layer: int) -> np.ndarray:
    """Combine weight of each (token, expert) pair in the plan's order."""
    flat = [np.asarray(context.work.array(attended_key(layer, shard), "weights")) for shard in context.used_shards]
    return np.concatenate(flat).reshape(-1)[np.asarray(plan["pairs"])]


def _evenly(rows: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `EXPERT_ROWS` of an expert's tokens, evenly spaced, zeros behind them; and their combine weights."""
    count = min(len(rows), EXPERT_ROWS)
    places = np.arange(count) * len(rows) // max(1, count)
    tried, share = np.zeros((EXPERT_ROWS, rows.shape[1]), np.float32), np.zeros(EXPERT_ROWS, np.float32)
    tried[:count], share[:count] = rows[places], shares[places]
    return tried, share
