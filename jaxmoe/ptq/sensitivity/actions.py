"""What the tasks of an analysis do. The forward pass is the quantiser's own: Embed, PlanLayer, Join, Clean are its.

    x (by shard) -> Observe -> PlanLayer -> ObserveExperts (by experts) -> Join -> x of the next layer
                       \\-> Measure (by linear), Probe -> Summarise <--/

Nothing is rounded into a file. What is kept of the activations is bounded: `KEPT_ROWS` tokens of each tap, and
`EXPERT_ROWS` of each expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.ops.experts import Activation
from jaxmoe.ptq.actions import Action, Context, Record
from jaxmoe.ptq.expert_action import RoutedRows
from jaxmoe.ptq.expert_run import run_expert
from jaxmoe.ptq.job import FLOAT32, Part, tap_of_match
from jaxmoe.ptq.layer_files import (
    attended_key,
    expert_key,
    load_samples,
    packed_stats,
    plan_key,
    stats_key,
    stream_rows,
    stream_samples,
)
from jaxmoe.ptq.layer_run import Sample
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


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What the samples of a shard fed a layer so far."""

    spreads: dict[str, Spread]
    """By tap."""
    rows: dict[str, list[np.ndarray]]
    """By tap: a few tokens of each sample."""
    cache: dict[str, np.ndarray]
    """By table: (noise, signal)."""

    def arrays(self) -> dict[str, np.ndarray | None]:
        """For a file."""
        seen: dict[str, np.ndarray | None] = {}
        for tap, spread in self.spreads.items():
            seen |= {f"spread:{tap}:{name}": array for name, array in spread.arrays().items()}
            seen[f"rows:{tap}"] = np.concatenate(self.rows[tap])
        return {**seen, **{f"cache:{table}": errors for table, errors in self.cache.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe(Action):
    """A shard's samples through a layer, as `Attend` does it, and what its linear layers were fed."""

    layer: int
    shard: int
    taps: tuple[str, ...]

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        lengths, dense = context.lengths_of(self.shard), context.job.files.manifest.config.dense_layers
        seen = _Seen(spreads={}, rows={tap: [] for tap in self.taps}, cache={})
        halves = self._halves(context, device, seen)
        if self.layer < dense:
            after = (Sample(x=half["stream"], selected=half["selected"]) for half in halves)
            stream_samples(context.work, self.layer + 1, self.shard, after, lengths)
        else:
            stream_rows(context.work, attended_key(self.layer, self.shard), halves, lengths)
        context.work.save(seen_key(self.layer, self.shard), seen.arrays())
        # What PlanLayer adds up for smoothing, of which there is none here.
        nothing = InputStats(absmax=np.zeros(1, np.float32), squares=np.zeros(1), count=np.asarray(0))
        context.work.save(stats_key(self.layer, self.shard), packed_stats({"none": nothing}))
        return {}

    def _halves(self, context: Context, device: Any, seen: _Seen) -> Iterator[dict[str, Any]]:
        """Fields of `Attended` of each sample; what it fed the layer is added to `seen`."""
        runner = context.runner(self.layer, device)
        for sample in load_samples(context.work, self.layer, self.shard, context.lengths_of(self.shard)):
            results, selected, spreads, kept, errors = watch_layer(
                runner.config, runner.width, self.taps, runner.weights, *runner.placed(sample), kept_rows(context)
            )
            half: dict[str, Any] = {name: np.asarray(array)[: len(sample.x)] for name, array in results.items()}
            if not all(np.isfinite(half[name]).all() for name in ("stream", "normed") if name in half):
                raise WeightsError(f"layer {self.layer} of the float model gives NaN or infinite values on the samples")
            for tap, spread in spreads.items():
                before = [seen.spreads[tap]] if tap in seen.spreads else []
                seen.spreads[tap] = Spread.merge_all([*before, rescaled(*spread)])
                seen.rows[tap].append(np.asarray(kept[tap]))
            for table, sides in errors.items():
                seen.cache[table] = seen.cache.get(table, np.zeros(2)) + np.asarray(sides, np.float64)
            yield {**half, "selected": None if selected is None else np.asarray(selected)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure(Action):
    """What each scheme costs a linear layer outside the routed experts."""

    layer: int
    part: Part
    schemes: Schemes

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        tap = tap_of_match(self.part.match, context.job.matches)
        assert tap is not None, self.part.match.entry.path
        rows = np.concatenate(
            [context.work.array(seen_key(self.layer, shard), f"rows:{tap}") for shard in context.used_shards]
        )
        weight = context.runner(self.layer, device).weights[self.part.name][0]
        errors = np.asarray(linear_errors(jax.device_put(rows, device), weight, self.schemes), np.float64)
        context.work.save(measure_key(self.layer, self.part.name), {"errors": errors})
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Action):
    """What each scheme costs the layer outside its routed experts, and how it disturbs routing, on one sample."""

    layer: int
    chosen: frozenset[str]
    """Local names of the weights that are quantised."""
    schemes: Schemes

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        runner, shard = context.runner(self.layer, device), context.used_shards[0]
        sample = load_samples(context.work, self.layer, shard, context.lengths_of(shard))[0]
        placed = runner.placed(sample)
        exact = layer_results(runner.config, runner.width, runner.weights, *placed)
        seen = []
        for scheme in self.schemes:
            quantised = quantised_weights(runner.weights, self.chosen, scheme)
            results = layer_results(runner.config, runner.width, quantised, *placed)
            seen.append(layer_errors(results, exact, placed[1]))
        arrays = {name: np.stack([np.asarray(each[name]) for each in seen]) for name in seen[0]}
        context.work.save(probe_key(self.layer), {**arrays, "tokens": np.asarray(len(sample.x))})
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveExperts(Action):
    """Experts `first` to `stop`: their outputs for the next layer, and what each scheme costs them."""

    layer: int
    first: int
    stop: int
    parts: tuple[Part, ...]
    """The layer's expert parameters, these experts only."""
    keeps: bool
    """Whether what they make of their tokens is kept for the next layer."""
    schemes: Schemes

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        plan = context.work.load(plan_key(self.layer))
        moe = context.job.files.manifest.config.moe
        activation = Activation(kind=moe.activation, limit=moe.limit)
        shares = _shares(context, plan, self.layer)
        columns: dict[str, list[np.ndarray]] = {"linear": [], "block": [], "tokens": [], "tried": []}
        spreads: dict[str, list[Spread]] = {"in": [], "hidden": []}
        for expert in range(self.first, self.stop):
            weights = {part.name.removeprefix("ffn."): _read(context, part, expert - self.first) for part in self.parts}
            rows = RoutedRows(context, plan, self.layer, expert)
            if self.keeps:
                self._keep(context, expert, weights, rows, activation, device)
            own = shares[plan["first"][expert] : plan["first"][expert + 1]]
            tried, share = _evenly(rows, own)
            result = expert_errors(*jax.device_put((weights, tried, share), device), activation, self.schemes)
            columns["linear"].append(np.asarray(result["linear"], np.float64))
            columns["block"].append(np.asarray(result["block"], np.float64))
            columns["tokens"].append(np.asarray(len(rows)))
            columns["tried"].append(np.asarray(min(len(rows), EXPERT_ROWS)))
            for name, each in result["spreads"].items():
                spreads[name].append(rescaled(*each))
        arrays = {name: np.stack(values) for name, values in columns.items()}
        for name, each in spreads.items():
            arrays |= {f"spread:{name}:{key}": array for key, array in Spread.merge_all(each).arrays().items()}
        context.work.save(experts_key(self.layer, self.first), arrays)
        return {}

    def _keep(
        self,
        context: Context,
        expert: int,
        weights: Mapping[str, np.ndarray],
        rows: RoutedRows,
        activation: Activation,
        device: Any,
    ) -> None:
        """Runs an expert for the next layer, its output straight into its file."""
        shape = (len(rows), context.job.files.manifest.config.embed)
        with context.work.filling(expert_key(self.layer, expert), {"out": (FLOAT32, shape)}) as places:
            seen = run_expert(weights, rows, activation=activation, grams=frozenset(), device=device, out=places["out"])
            if not seen.finite:
                raise WeightsError(
                    f"layer {self.layer}, expert {expert} of the float model gives NaN or infinite values on the "
                    "samples"
                )


def kept_rows(context: Context) -> int:
    """Tokens that are kept of each sample and tap."""
    assert context.calibration is not None
    return -(-KEPT_ROWS // len(context.calibration.lengths))


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


def _read(context: Context, part: Part, index: int = 0) -> np.ndarray:
    whole = tuple(slice(0, size) for size in cell_shape(part.match.entry))
    return context.job.source.read(part.match.entry, part.cells[index][0], whole).astype(np.float32)


def _shares(context: Context, plan: Mapping[str, np.ndarray], layer: int) -> np.ndarray:
    """How much of an expert's output enters the residual stream, by (token, expert) pair in the plan's order.

    The combine weight; with hyper-connections times the root of the sum of squares of the token's gates: so large are
    the additions to all streams together.
    """
    flat = []
    for shard in context.used_shards:
        arrays = context.work.load(attended_key(layer, shard))
        weights = np.asarray(arrays["weights"])
        if "gates" in arrays:
            weights = weights * np.sqrt(np.square(np.asarray(arrays["gates"])).sum(axis=1, keepdims=True))
        flat.append(weights)
    return np.concatenate(flat).reshape(-1)[np.asarray(plan["pairs"])]


def _evenly(rows: RoutedRows, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `EXPERT_ROWS` of an expert's tokens, evenly spaced, zeros behind them; and their shares."""
    count = min(len(rows), EXPERT_ROWS)
    places = np.arange(count) * len(rows) // max(1, count)
    tried, share = np.zeros((EXPERT_ROWS, rows[:0].shape[1]), np.float32), np.zeros(EXPERT_ROWS, np.float32)
    for index, place in enumerate(places.tolist()):
        tried[index] = rows[place : place + 1][0]
    share[:count] = shares[places]
    return tried, share
