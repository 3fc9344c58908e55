"""Smoothing by powers of two: large activation channels are divided on one side and multiplied on the other.

A factor moves from a layer's input into the norm (or the projection) that makes it, and into the columns of all that
read it. Powers of two change exponents only, so float weights, norms and the router stay exact in every float format:
the smoothed float model is the original, bit for bit, and a gain never costs a rounding. The price is at most a factor
of sqrt(2) from the best scale of a channel. Source: Xiao et al. 2022 (arXiv 2211.10438), equation 4.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.ptq.statistics import InputStats

LARGEST_EXPONENT = 12
"""Exponents are cut to -12..12: beyond it a channel is all or nothing anyway, and formats have limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What happens to a matrix [out, in] or a vector before rounding: w * 2**rows[:, None] * 2**columns[None, :]."""

    rows: np.ndarray | None = None
    """[out] int8; [width] of a norm or bias."""
    columns: np.ndarray | None = None
    """[in] int8."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing happens."""
        return self.rows is None and self.columns is None

    def arrays(self) -> dict[str, np.ndarray]:
        """For a file."""
        fields = {"rows": self.rows, "columns": self.columns}
        return {name: array for name, array in fields.items() if array is not None}


def exponents(activations: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    """[channels] int8: log2 of activations**alpha / weights**(1 - alpha), centred and rounded.

    Args:
        activations: [channels] largest magnitude of each channel.
        weights: [channels] largest magnitude of the columns that read it.
        alpha: share of the difficulty that moves into the weights.
    """
    known = (activations > 0) & (weights > 0) & np.isfinite(activations) & np.isfinite(weights)
    a, w = np.where(known, activations, 1).astype(np.float64), np.where(known, weights, 1).astype(np.float64)
    raw = np.where(known, alpha * np.log2(a) - (1 - alpha) * np.log2(w), np.nan)
    # A common factor of all channels changes nothing per token; the median keeps magnitudes where they were.
    with np.errstate(invalid="ignore"):
        middle = np.median(np.where(known, raw, 0.0), axis=-1, keepdims=True)
    centred = np.where(known, raw - middle, 0.0)
    return np.clip(np.rint(centred), -LARGEST_EXPONENT, LARGEST_EXPONENT).astype(np.int8)


def column_max(weight: np.ndarray) -> np.ndarray:
    """[in]: largest magnitude of each column of [out, in]."""
    return np.abs(weight).max(axis=0)


def layer_treatments(
    config: DecoderConfig,
    columns: Mapping[str, np.ndarray],
    present: frozenset[str],
    stats: Mapping[str, InputStats],
    alphas: Mapping[str, float],
) -> dict[str, Treatment]:
    """Local name -> treatment of one layer: all but what each routed expert decides for itself.

    Args:
        config: the model.
        columns: local name -> `column_max` of what is quantised and reads a smoothed input; of 'ffn.gate' and 'ffn.up'
            of routed experts the largest over all experts.
        present: local names of the layer's parameters.
        stats: what the layer was fed, by tap.
        alphas: local name -> share of the difficulty that moves into this weight, of what the recipe rounds; where
            several read one input the least counts.
    """
    plan = _Plan(columns=columns, present=present, alphas=alphas)
    plan.group(
        stats["attention.in"],
        readers=[f"attention.{name}" for name in ("q", "k", "v", "q_a", "kv_a", "gate")]
        + ["indexer.k", "indexer.weights"]
        + ([] if "attention.q_a" in present else ["indexer.q"]),
        makers=["attention_norm.weight"],
    )
    _values(plan, config, stats["attention.o.in"])
    readers = ["ffn.router.weight", "ffn.gate", "ffn.up", "ffn.shared.gate", "ffn.shared.up"]
    plan.group(stats["ffn.in"], readers=readers, makers=["ffn_norm.weight"])
    if "ffn.down.in" in stats:
        plan.group(stats["ffn.down.in"], readers=["ffn.down"], makers=["ffn.up"])
    if "shared.down.in" in stats:
        plan.group(stats["shared.down.in"], readers=["ffn.shared.down"], makers=["ffn.shared.up"])
    return plan.result()


def smooths_hidden(config: DecoderConfig) -> bool:
    """Whether a factor passes from an expert's up projection to its down projection: no clamp or sum in between."""
    return config.moe.activation == "swiglu" and config.moe.limit is None


def _values(plan: "_Plan", config: DecoderConfig, stats: InputStats) -> None:
    """Value channels: made by v_proj (shared by the query heads of a group) or by kv_b_proj's second halves."""
    attention = config.attention
    if isinstance(attention, AttentionConfig):
        shape = (attention.kv_heads, attention.heads // attention.kv_heads, attention.head_dim)
        shared = plan.shared_exponents(stats, "attention.o", shape, axis=1)
        if shared is not None:
            plan.move("attention.o", np.broadcast_to(shared, shape).reshape(-1))
            for maker in ("attention.v", "attention.v_bias"):
                plan.take(maker, shared.reshape(-1))
        return
    own = plan.shared_exponents(stats, "attention.o", (attention.heads, attention.v_dim), axis=None)
    if own is not None:
        plan.move("attention.o", own.reshape(-1))
        halves = np.zeros((attention.heads, attention.nope_dim + attention.v_dim), np.int8)
        halves[:, attention.nope_dim :] = own
        plan.take("attention.kv_b", halves.reshape(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Collects exponents of rows and columns while groups are planned; each column group is planned once."""

    columns: Mapping[str, np.ndarray]
    present: frozenset[str]
    alphas: Mapping[str, float]
    _rows: dict[str, np.ndarray] = field(default_factory=dict)
    _moved: dict[str, np.ndarray] = field(default_factory=dict)

    def group(self, stats: InputStats, *, readers: Iterable[str], makers: Iterable[str]) -> None:
        """One input with all that reads it and all that makes it."""
        readers = [name for name in readers if name in self.present]
        rounded = [name for name in readers if name in self.alphas]
        if not rounded:
            return
        alpha = min(self.alphas[name] for name in rounded)
        chosen = exponents(stats.absmax, np.maximum.reduce([self.columns[name] for name in rounded]), alpha)
        for name in readers:
            self.move(name, chosen)
        for name in makers:
            self.take(name, chosen)

    def shared_exponents(
        self, stats: InputStats, reader: str, shape: tuple[int, ...], axis: int | None
    ) -> np.ndarray | None:
        """Exponents of a reader's channels, equal along `axis` (kept with size one); None: nothing is to be gained."""
        if reader not in self.alphas:
            return None
        activations, columns = stats.absmax.reshape(shape), self.columns[reader].reshape(shape)
        if axis is not None:
            activations, columns = activations.max(axis, keepdims=True), columns.max(axis, keepdims=True)
        return exponents(activations.reshape(-1), columns.reshape(-1), self.alphas[reader]).reshape(activations.shape)

    def move(self, reader: str, chosen: np.ndarray) -> None:
        """Multiplies a reader's columns."""
        assert reader not in self._moved, reader
        self._moved[reader] = chosen

    def take(self, maker: str, chosen: np.ndarray) -> None:
        """Divides a maker's rows, if it is there."""
        if maker in self.present:
            assert maker not in self._rows, maker
            self._rows[maker] = (-chosen).astype(np.int8)

    def result(self) -> dict[str, Treatment]:
        """All treatments."""
        names = sorted({*self._rows, *self._moved})
        return {name: Treatment(rows=self._rows.get(name), columns=self._moved.get(name)) for name in names}


def scale_weight(weight: np.ndarray, treatment: Treatment) -> np.ndarray:
    """A weight [out, in] or vector [width] in float32 with its exponents applied: exact."""
    scaled = weight.astype(np.float32)
    if treatment.rows is not None:
        rows = np.exp2(treatment.rows.astype(np.float32))
        scaled = scaled * (rows if weight.ndim == 1 else rows[:, None])
    if treatment.columns is not None:
        scaled = scaled * np.exp2(treatment.columns.astype(np.float32))[None, :]
    return scaled
