"""The task of some routed experts of a layer: each is read once, run, smoothed, rounded and written."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.ops.experts import Activation
from jaxmoe.ptq.actions import Action, Context, Record
from jaxmoe.ptq.expert_run import ExpertPass, hidden_of, run_expert
from jaxmoe.ptq.job import FLOAT32, Part, needs_of
from jaxmoe.ptq.layer_files import attended_key, expert_key, plan_key, treatment_of, unpacked_stats
from jaxmoe.ptq.moments import moment_of, smoothed_moment, unit_moment
from jaxmoe.ptq.report import TensorReport
from jaxmoe.ptq.rounding.cold import alike, cold_moment
from jaxmoe.ptq.smooth import Treatment, column_max, exponents, scale_weight, smooths_hidden
from jaxmoe.ptq.smooth_search import search_exponents
from jaxmoe.ptq.write_part import no_moment, round_cells, write_part
from jaxmoe.weights.cells import cell_shape

_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExperts(Action):
    """Experts `first` to `stop` of a layer."""

    layer: int
    first: int
    stop: int
    parts: tuple[Part, ...]
    """The layer's expert parameters, these experts only."""
    writes: bool = True
    """Whether they are rounded and written, or only run."""
    keeps: bool = True
    """Whether what they make of their tokens is kept for the next layer."""

    def run(self, context: Context, device: Any) -> Record:
        """See the module."""
        plan = context.work.load(plan_key(self.layer))
        reports = [
            report for expert in range(self.first, self.stop) for report in self._one(context, plan, expert, device)
        ]
        if self.writes:
            context.shards.make_durable(spec.name for part in self.parts for spec in part.specs(context.job))
        return {"tensors": [asdict(report) for report in reports]}

    def _one(self, context: Context, plan: Mapping[str, np.ndarray], expert: int, device: Any) -> list[TensorReport]:
        parts = {part.name.removeprefix("ffn."): _of_expert(part, expert - self.first) for part in self.parts}
        weights = {name: _read(context, part) for name, part in parts.items()}
        moe = context.job.files.manifest.config.moe
        activation = Activation(kind=moe.activation, limit=moe.limit)
        rows = RoutedRows(context, plan, self.layer, expert)
        shape = (len(rows), context.job.files.manifest.config.embed)
        key, arrays = expert_key(self.layer, expert), {"out": (FLOAT32, shape)}
        with context.work.filling(key, arrays) if self.keeps else nullcontext() as places:
            seen = run_expert(
                weights,
                rows,
                activation=activation,
                grams=_grams(parts) if self.writes else frozenset(),
                device=device,
                out=None if places is None else places["out"],
            )
        if not seen.finite:
            raise WeightsError(
                f"layer {self.layer}, expert {expert} of the float model gives NaN or infinite values on the samples"
            )
        if not self.writes:
            return []
        recipe = context.job.recipe.calibration
        assert recipe is not None
        tries = recipe.search_hidden and len(rows) > 0
        sample = hidden_of(weights, rows, activation=activation, device=device) if tries else None
        treated = self._treatments(context, plan, parts, weights, seen, sample, device)
        reports: list[TensorReport] = []
        for name, part in parts.items():
            treatment = treated.get(name, Treatment())
            if part.match.scheme is None:
                write_part(context.job, context.shards, part, treatment=treatment, moments=no_moment, device=device)
                continue
            moment = self._moment(context, plan, part, name, seen, treatment, f"layer {self.layer}, expert {expert}")
            weight = scale_weight(weights[name], treatment)[None]
            stacked = None if moment is None else moment[None]
            reports.extend(round_cells(context.job, context.shards, part, part.cells, weight, stacked, device))
        return reports

    def _treatments(
        self,
        context: Context,
        plan: Mapping[str, np.ndarray],
        parts: Mapping[str, Part],
        weights: Mapping[str, np.ndarray],
        seen: ExpertPass,
        sample: np.ndarray | None,
        device: Any,
    ) -> dict[str, Treatment]:
        """Inputs are smoothed as the layer's plan says, hidden channels as this expert needs it."""
        columns = {name: treatment_of(plan, f"ffn.{name}").columns for name in ("gate", "up")}
        recipe, scheme = context.job.recipe.calibration, parts["down"].match.scheme
        assert recipe is not None
        alpha = None if scheme is None else recipe.alpha(scheme)
        if alpha is None or not smooths_hidden(context.job.files.manifest.config):
            return {name: Treatment(columns=columns[name]) for name in columns}
        assert scheme is not None
        if sample is not None:
            hidden = search_exponents(sample, seen.hidden.absmax, weights["down"], scheme, device)
        else:
            hidden = exponents(seen.hidden.absmax, column_max(weights["down"]), alpha)
        made = (-hidden).astype(np.int8)
        return {
            "gate": Treatment(columns=columns["gate"]),
            "up": Treatment(columns=columns["up"], rows=made),
            "up_bias": Treatment(rows=made),
            "down": Treatment(columns=hidden),
        }

    def _moment(
        self,
        context: Context,
        plan: Mapping[str, np.ndarray],
        part: Part,
        name: str,
        seen: ExpertPass,
        treatment: Treatment,
        where: str,
    ) -> np.ndarray | None:
        """What a projection is rounded by; None: nothing, or all inputs alike."""
        needs, recipe = needs_of(part.match), context.job.recipe.calibration
        stats = seen.hidden if name == "down" else seen.inputs
        own = moment_of(stats, needs)
        if own is None:
            return None
        # Hidden channels of two experts have nothing in common but their number.
        prior = alike(own) if name == "down" else moment_of(unpacked_stats(plan)["ffn.in"], needs)
        assert recipe is not None and prior is not None
        moment = cold_moment(
            recipe.cold_expert, own, int(stats.count), prior, min_tokens=recipe.expert_tokens, where=where
        )
        # Of nothing at all: like an input that was never seen.
        return unit_moment(np.zeros_like(own) if moment is None else smoothed_moment(moment, treatment))


@final
class RoutedRows:
    """What the feed-forward is fed at the tokens that chose an expert, in order: read when a slice is taken."""

    def __init__(self, context: Context, plan: Mapping[str, np.ndarray], layer: int, expert: int) -> None:
        """Args: context: of the run; plan: of the layer; layer, expert: which."""
        first = plan["first"]
        pairs = np.asarray(plan["pairs"][first[expert] : first[expert + 1]])
        self._tokens = pairs // context.job.files.manifest.config.moe.router.top_k
        shards = context.token_starts
        self._starts = np.array(list(shards.values()))
        self._rows = [context.work.array(attended_key(layer, shard), "normed") for shard in shards]

    def __len__(self) -> int:
        """Tokens."""
        return len(self._tokens)

    def __getitem__(self, part: slice) -> np.ndarray:
        """[tokens, embed] float32."""
        tokens = self._tokens[part]
        owner = np.searchsorted(self._starts, tokens, side="right") - 1
        out = np.empty((len(tokens), self._rows[0].shape[-1]), np.float32)
        for shard in np.unique(owner).tolist():
            chosen = owner == shard
            out[chosen] = self._rows[shard][tokens[chosen] - self._starts[shard]]
        return out


def _of_expert(part: Part, index: int) -> Part:
    return Part(match=part.match, layer=part.layer, cells=part.cells[index : index + 1])


def _read(context: Context, part: Part) -> np.ndarray:
    whole = tuple(slice(0, size) for size in cell_shape(part.match.entry))
    return context.job.source.read(part.match.entry, part.cells[0][0], whole).astype(np.float32)


def _grams(parts: Mapping[str, Part]) -> frozenset[str]:
    """Which Gram matrices the projections' methods need."""
    wanted = {name for name in _PROJECTIONS if needs_of(parts[name].match) == "hessian"}
    return frozenset(({"hidden"} if "down" in wanted else set()) | ({"inputs"} if wanted - {"down"} else set()))
