"""The rows of an analysis: one for each linear layer (for a layer's experts together), and one for each layer."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from jaxmoe.ptq.actions import Action, Context, Record
from jaxmoe.ptq.job import Part, tap_of_match
from jaxmoe.ptq.sensitivity.actions import (
    PROJECTIONS,
    experts_key,
    measure_key,
    probe_key,
    seen_key,
    unpacked_spread,
)
from jaxmoe.ptq.sensitivity.measure import Schemes
from jaxmoe.ptq.sensitivity.spread import Spread

LINEAR_METRICS: Final = ("std", "quantile", "kurtosis")
"""Of the input of a linear layer; the larger, the harder to quantise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstExpert:
    """An expert and the noise / signal of its output."""

    expert: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRow:
    """A linear layer, or one projection of all routed experts of a layer."""

    layer: int
    role: str
    name: str
    """Within the layer."""
    values: int
    """Values of the input that the first three metrics are about."""
    std: float | None
    """Largest magnitude in standard deviations."""
    quantile: float | None
    """An INT8 step of the whole range in interquartile ranges."""
    kurtosis: float | None
    """Excess kurtosis."""
    error: dict[str, float | None]
    """Scheme -> noise / signal of the output, tokens alike; None: there is no signal."""
    worst_expert: dict[str, WorstExpert] | None
    """Scheme -> the expert of the largest noise / signal; None: not an expert's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A layer whose quantisable linear layers are all of one scheme."""

    layer: int
    mse: dict[str, float]
    """Scheme -> mean squared error of the numbers that leave the layer: of all residual streams if there are several.

    The errors of routed experts are taken as independent of each other and of the rest."""
    relative: dict[str, float | None]
    """The same in mean squares of what leaves the layer without its routed experts."""
    router_agreement: dict[str, float] | None
    """Scheme -> share of chosen experts that stay when what the router reads is disturbed; None: a dense layer."""
    cache_sqnr_db: dict[str, float | None]
    """Table -> signal to noise of INT8 storage with one scale for each token and head; None: no noise or signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarise(Action):
    """Adds up what the other tasks of a layer left, in a fixed order."""

    layer: int
    alone: tuple[Part, ...]
    """Linear layers that were measured, outside the routed experts."""
    routed: tuple[Part, ...]
    firsts: tuple[int, ...]
    """First experts of the layer's tasks."""
    schemes: Schemes

    def run(self, context: Context, device: Any) -> Record:
        """See the class."""
        seen = [context.work.load(seen_key(self.layer, shard)) for shard in context.used_shards]
        names = [scheme.name for scheme in self.schemes]
        rows, spreads = [], dict[str, Spread]()
        for part in self.alone:
            tap = tap_of_match(part.match, context.job.matches)
            assert tap is not None, part.name
            if tap not in spreads:
                spreads[tap] = Spread.merge_all(unpacked_spread(arrays, tap) for arrays in seen)
            errors = np.asarray(context.work.array(measure_key(self.layer, part.name), "errors"))
            rows.append(self._row(part, spreads[tap], {n: _ratio(*e) for n, e in zip(names, errors, strict=True)}))
        expert_noise = np.zeros(len(names))
        if self.routed:
            experts, expert_noise = self._experts(context, names)
            rows.extend(experts)
        layer = self._layer(context, seen, names, expert_noise)
        return {"linears": [asdict(row) for row in rows], "layer": asdict(layer)}

    def _row(
        self, part: Part, spread: Spread, error: dict[str, float | None], worst: dict[str, WorstExpert] | None = None
    ) -> LinearRow:
        return LinearRow(
            layer=self.layer,
            role=part.match.entry.role,
            name=part.name,
            values=spread.elements,
            std=spread.std_ratio(),
            quantile=spread.quantile_ratio(),
            kurtosis=spread.kurtosis(),
            error=error,
            worst_expert=worst,
        )

    def _experts(self, context: Context, names: list[str]) -> tuple[list[LinearRow], np.ndarray]:
        """Rows of the projections; and by scheme the noise of all experts' outputs, over all tokens."""
        parts = [context.work.load(experts_key(self.layer, first)) for first in self.firsts]
        tokens, tried, linear, block = (
            np.concatenate([arrays[key] for arrays in parts]) for key in ("tokens", "tried", "linear", "block")
        )
        # Tokens that were tried stand for all that the expert was given.
        weight = np.where(tried > 0, tokens / np.maximum(tried, 1), 0.0)
        spreads = {
            name: Spread.merge_all(unpacked_spread(arrays, name) for arrays in parts) for name in ("in", "hidden")
        }
        rows = []
        for part in self.routed:
            projection = part.name.removeprefix("ffn.")
            if projection not in PROJECTIONS:
                continue
            own = linear[:, PROJECTIONS.index(projection)]
            total = (own * weight[:, None, None]).sum(axis=0)
            error = {name: _ratio(*sides) for name, sides in zip(names, total, strict=True)}
            worst = {name: _worst(own[:, index]) for index, name in enumerate(names)}
            spread = spreads["hidden" if projection == "down" else "in"]
            rows.append(self._row(part, spread, error, worst))
        return rows, (block[:, :, 0] * weight[:, None]).sum(axis=0)

    def _layer(
        self,
        context: Context,
        seen: list[dict[str, np.ndarray]],
        names: list[str],
        expert_noise: np.ndarray,
    ) -> LayerRow:
        probe = context.work.load(probe_key(self.layer))
        config = context.job.files.manifest.config
        numbers = config.embed * (1 if config.hyper is None else config.hyper.streams)
        probed = int(probe["tokens"]) * numbers
        all_tokens = sum(sum(context.lengths_of(shard)) for shard in context.used_shards)
        sides = np.asarray(probe["sides"], np.float64)
        mse = sides[:, 0] / probed + expert_noise / (all_tokens * numbers)
        signal = sides[0, 1] / probed
        tables = [key.removeprefix("cache:") for key in seen[0] if key.startswith("cache:")]
        cache = {table: np.add.reduce([np.asarray(arrays[f"cache:{table}"]) for arrays in seen]) for table in tables}
        routing = None
        if "routing" in probe:
            routing = {
                name: int(same) / int(chosen) for name, (same, chosen) in zip(names, probe["routing"], strict=True)
            }
        return LayerRow(
            layer=self.layer,
            mse=dict(zip(names, mse.tolist(), strict=True)),
            relative={name: _ratio(value, signal) for name, value in zip(names, mse, strict=True)},
            router_agreement=routing,
            cache_sqnr_db={table: _decibel(*each) for table, each in sorted(cache.items())},
        )


def _ratio(noise: float, signal: float) -> float | None:
    return float(noise) / float(signal) if signal > 0 else None


def _worst(errors: np.ndarray) -> WorstExpert:
    """Of (noise, signal) [experts, 2]; an expert without signal has no error."""
    ratios = np.where(errors[:, 1] > 0, errors[:, 0] / np.where(errors[:, 1] > 0, errors[:, 1], 1.0), 0.0)
    expert = int(np.argmax(ratios))
    return WorstExpert(expert=expert, error=float(ratios[expert]))


def _decibel(noise: float, signal: float) -> float | None:
    return 10 * math.log10(float(signal) / float(noise)) if noise > 0 and signal > 0 else None
