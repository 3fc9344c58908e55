"""Second moments of the inputs that a weight is rounded by, before and after smoothing."""

from typing import Final

import numpy as np

from jaxmoe.ptq.rounding import Needs
from jaxmoe.ptq.smooth import Treatment
from jaxmoe.ptq.statistics import InputStats

_READERS: Final[dict[str, tuple[str, ...]]] = {
    "attention.in": (
        *(f"attention.{name}" for name in ("q", "k", "v", "q_a", "kv_a", "gate")),
        *(f"indexer.{name}" for name in ("q", "k", "weights")),
    ),
    "attention.o.in": ("attention.o",),
    "ffn.in": ("ffn.router.weight", "ffn.gate", "ffn.up", "ffn.shared.gate", "ffn.shared.up"),
    "ffn.down.in": ("ffn.down",),
    "shared.down.in": ("ffn.shared.down",),
}
"""Tap -> local names of the matrices that it is the input of."""

SMALLEST_IMPORTANCE = np.float32(1e-3)
"""Of the mean. A channel that calibration never saw still has to be stored: this keeps it in play."""


def moment_of(stats: InputStats, needs: Needs) -> np.ndarray | None:
    """What a method wants to know, before smoothing, float64."""
    if needs == "nothing":
        return None
    return stats.mean_square() if needs == "importance" else stats.mean_gram()


def smoothed_moment(moment: np.ndarray, treatment: Treatment) -> np.ndarray:
    """A moment of the input as it is after smoothing: channels are divided by 2**columns."""
    if treatment.columns is None:
        return moment
    factor = np.exp2(-treatment.columns.astype(np.float64))
    return moment * np.square(factor) if moment.ndim == 1 else moment * factor[:, None] * factor[None, :]


def unit_moment(moment: np.ndarray) -> np.ndarray:
    """float32 with a mean (of the diagonal) of one; an importance is at least `SMALLEST_IMPORTANCE`.

    All zeros, the moment of what was never seen, becomes alike for all channels.
    """
    mean = float(moment.mean() if moment.ndim == 1 else np.trace(moment) / len(moment))
    if not (np.isfinite(mean) and mean > 0):
        return np.ones_like(moment, np.float32) if moment.ndim == 1 else np.eye(len(moment), dtype=np.float32)
    unit = (moment / mean).astype(np.float32)
    return np.maximum(unit, SMALLEST_IMPORTANCE) if moment.ndim == 1 else unit


def tap_of(name: str, *, compressed_queries: bool) -> str | None:
    """The tap that a parameter outside the routed experts reads; None: it reads none (or is no matrix).

    Args:
        name: local name, such as 'attention.q'.
        compressed_queries: whether queries are made from a latent vector (q_a), which the indexer reads too.
    """
    if name == "indexer.q" and compressed_queries:
        return None
    return next((tap for tap, readers in _READERS.items() if name in readers), None)
