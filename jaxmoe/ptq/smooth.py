"""Smoothing by powers of two: large activation channels are divided on one side and multiplied on the other.

A factor moves from a layer's input into the norm (or the projection) that makes it, and into the columns of all that
read it. Powers of two change exponents only, so float weights, norms and the router stay exact in every float format:
the smoothed float model is the original, bit for bit, and a gain never costs a rounding. The price is at most a factor
of sqrt(2) from the best scale of a channel. Source: Xiao et al. 2022 (arXiv 2211.10438), equation 4.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.ptq.layer_run import LayerObservation
from jaxmoe.ptq.statistics import ChannelStats

LARGEST_EXPONENT = 12
"""Exponents are cut to -12..12: beyond it a channel is all or nothing anyway, and formats have limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What happens to a parameter of one layer before rounding: w * 2**rows[:, None] * 2**columns[None, :].

    Leading axes of all arrays are those of the parameter in one layer: none, or experts.
    """

    rows: np.ndarray | None = None
    """[*lead, out] int8; [width] of a norm or bias."""
    columns: np.ndarray | None = None
    """[*lead, in] int8."""
    importance: np.ndarray | None = None
    """[*lead, in] float32: mean square of each input channel after smoothing, for weighted rounding."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing happens."""
        return self.rows is None and self.columns is None and self.importance is None


def exponents(activations: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    """[channels] int8: log2 of activations**alpha / weights**(1 - alpha), centred and rounded.

    Args:
        activations: [*lead, channels] largest magnitude of each channel.
        weights: [*lead, channels] largest magnitude of the columns that read it.
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


def treatments(
    config: DecoderConfig,
    weights: Mapping[str, np.ndarray],
    observation: LayerObservation,
    quantized: frozenset[str],
    alpha: float | None,
) -> dict[str, Treatment]:
    """Parameter path within its block -> treatment, of one layer.

    Args:
        config: the model.
        weights: of `load_layer`.
        observation: what the layer was fed.
        quantized: paths that the recipe rounds.
        alpha: of smoothing; None: no smoothing, importance only.
    """
    plan = _Plan(weights=weights, quantized=quantized, alpha=alpha)
    plan.group(
        observation.inputs["attention.in"],
        readers=[f"attention.{name}" for name in ("q", "k", "v", "q_a", "kv_a", "gate")]
        + ["indexer.k", "indexer.weights"]
        + ([] if "attention.q_a" in weights else ["indexer.q"]),
        makers=["attention_norm.weight"],
    )
    _values(plan, config, observation.inputs["attention.o.in"])
    readers = ["ffn.router.weight", "ffn.gate", "ffn.up", "ffn.shared.gate", "ffn.shared.up"]
    plan.group(observation.inputs["ffn.in"], readers=readers, makers=["ffn_norm.weight"])
    if observation.expert_inputs is None:
        plan.group(observation.inputs["ffn.down.in"], readers=["ffn.down"], makers=["ffn.up"])
        return plan.result()
    if "shared.down.in" in observation.inputs:
        plan.group(observation.inputs["shared.down.in"], readers=["ffn.shared.down"], makers=["ffn.shared.up"])
    assert observation.expert_hidden is not None
    # A clamp or an added one stands between up and down: a factor cannot pass it.
    passes = config.moe.activation == "swiglu" and config.moe.limit is None
    plan.group(
        observation.expert_hidden,
        readers=["ffn.down"],
        makers=["ffn.up", "ffn.up_bias"] if passes else [],
        moves=passes,
    )
    plan.expert_importance(("ffn.gate", "ffn.up"), observation.expert_inputs)
    plan.expert_importance(("ffn.down",), observation.expert_hidden)
    return plan.result()


def _values(plan: "_Plan", config: DecoderConfig, stats: ChannelStats) -> None:
    """Value channels: made by v_proj (shared by the query heads of a group) or by kv_b_proj's second halves."""
    attention = config.attention
    if isinstance(attention, AttentionConfig):
        shape = (attention.kv_heads, attention.heads // attention.kv_heads, attention.head_dim)
        shared = plan.shared_exponents(stats, "attention.o", shape, axis=1)
        if shared is not None:
            plan.move("attention.o", np.broadcast_to(shared, shape).reshape(-1))
            for maker in ("attention.v", "attention.v_bias"):
                plan.take(maker, shared.reshape(-1))
        plan.importance("attention.o", stats)
        return
    own = plan.shared_exponents(stats, "attention.o", (attention.heads, attention.v_dim), axis=None)
    if own is not None:
        plan.move("attention.o", own.reshape(-1))
        halves = np.zeros((attention.heads, attention.nope_dim + attention.v_dim), np.int8)
        halves[:, attention.nope_dim :] = own
        plan.take("attention.kv_b", halves.reshape(-1))
    plan.importance("attention.o", stats)


class _Plan:
    """Collects exponents of rows and columns while groups are planned; each column group is planned once."""

    def __init__(self, *, weights: Mapping[str, np.ndarray], quantized: frozenset[str], alpha: float | None):
        self._weights, self._quantized, self._alpha = weights, quantized, alpha
        self._rows: dict[str, np.ndarray] = {}
        self._columns: dict[str, np.ndarray] = {}
        self._importance: dict[str, np.ndarray] = {}

    def group(self, stats: ChannelStats, *, readers: Iterable[str], makers: Iterable[str], moves: bool = True) -> None:
        """One input with all that reads it and all that makes it."""
        present = [name for name in readers if name in self._weights]
        rounded = [name for name in present if name in self._quantized]
        if moves and rounded and self._alpha is not None:
            tops = [self._column_max(name, stats.absmax.ndim) for name in rounded]
            chosen = exponents(stats.absmax, np.maximum.reduce(tops), self._alpha)
            for name in present:
                self.move(name, chosen)
            for name in makers:
                self.take(name, chosen)
        for name in rounded:
            self.importance(name, stats)

    def shared_exponents(
        self, stats: ChannelStats, reader: str, shape: tuple[int, ...], axis: int | None
    ) -> np.ndarray | None:
        """Exponents of a reader's channels, equal along `axis` (kept with size one); None: nothing is to be gained."""
        if self._alpha is None or reader not in self._quantized:
            return None
        activations, columns = stats.absmax.reshape(shape), self._column_max(reader, 1).reshape(shape)
        if axis is not None:
            activations, columns = activations.max(axis, keepdims=True), columns.max(axis, keepdims=True)
        return exponents(activations.reshape(-1), columns.reshape(-1), self._alpha).reshape(activations.shape)

    def move(self, reader: str, chosen: np.ndarray) -> None:
        """Multiplies a reader's columns."""
        assert reader not in self._columns, reader
        lead = self._weights[reader].shape[1:-2]
        self._columns[reader] = np.broadcast_to(chosen, (*lead, chosen.shape[-1])) if chosen.ndim == 1 else chosen

    def take(self, maker: str, chosen: np.ndarray) -> None:
        """Divides a maker's rows, if it is there."""
        if maker in self._weights:
            assert maker not in self._rows, maker
            self._rows[maker] = (-chosen).astype(np.int8)

    def importance(self, reader: str, stats: ChannelStats) -> None:
        """Mean squares of a reader's input as it will be."""
        if reader in self._quantized:
            self._importance[reader] = self._smoothed(reader, stats.mean_square())

    def expert_importance(self, readers: Iterable[str], stats: ChannelStats) -> None:
        """Of each expert, drawn towards the mean of all the more, the fewer tokens it saw."""
        for reader in readers:
            if reader in self._quantized:
                own, count = stats.mean_square(), stats.count[:, None].astype(np.float64)
                mean = stats.squares.sum(0, keepdims=True) / max(1, int(stats.count.sum()))
                share = count / (count + own.shape[-1])
                self._importance[reader] = self._smoothed(reader, share * own + (1 - share) * mean)

    def _smoothed(self, reader: str, squares: np.ndarray) -> np.ndarray:
        columns = self._columns.get(reader)
        scaled = squares if columns is None else squares * np.exp2(-2.0 * columns)
        return scaled.astype(np.float32)

    def _column_max(self, name: str, ndim: int) -> np.ndarray:
        """Largest magnitude of each column: of each expert where the input has experts, else over all of them."""
        columns = np.abs(self._weights[name][0]).max(axis=-2)
        return columns if columns.ndim == ndim else columns.max(axis=0)

    def result(self) -> dict[str, Treatment]:
        """All treatments."""
        names = {*self._rows, *self._columns, *self._importance}
        return {
            name: Treatment(
                rows=self._rows.get(name), columns=self._columns.get(name), importance=self._importance.get(name)
            )
            for name in sorted(names)
        }
