"""Statistics of a linear layer's input, per channel: what smoothing and weighted rounding need.

A sample's numbers come from a program that sees that sample alone, and the host adds them in the order of samples, in
float64: the result has the same bytes however many devices ran the samples.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """A monoid: `merge` is associative for `absmax` and `count`, and exact in a fixed order for `squares`.

    Invariants: absmax.shape == squares.shape == (*lead, channels); count.shape == lead; lead counts experts, if any.
    """

    absmax: np.ndarray
    squares: np.ndarray
    """Sum of squares."""
    count: np.ndarray
    """Tokens seen."""

    @classmethod
    def merge_all(cls, parts: Iterable["ChannelStats"]) -> "ChannelStats":
        """The statistics of all samples, added in the given order.

        Raises:
            ValueError: there are none.
        """
        total: ChannelStats | None = None
        for part in parts:
            total = part.widened() if total is None else total.merge(part)
        if total is None:
            raise ValueError("no statistics to merge: there are no samples")
        return total

    def widened(self) -> "ChannelStats":
        """The same in float64 and int64."""
        return ChannelStats(
            absmax=np.asarray(self.absmax, np.float32),
            squares=np.asarray(self.squares, np.float64),
            count=np.asarray(self.count, np.int64),
        )

    def merge(self, other: "ChannelStats") -> "ChannelStats":
        """Both together."""
        wide = other.widened()
        return ChannelStats(
            absmax=np.maximum(self.absmax, wide.absmax),
            squares=self.squares + wide.squares,
            count=np.asarray(self.count + wide.count),
        )

    def mean_square(self) -> np.ndarray:
        """E[x^2] per channel, float64; zero where nothing was seen."""
        return self.squares / np.maximum(self.count, 1)[..., None]


def channel_stats(
    x: Float[Array, "tokens channels"], real: Bool[Array, " tokens"]
) -> tuple[Float[Array, " channels"], Float[Array, " channels"], Array]:
    """absmax, sum of squares and count of the real rows of one sample; padding is masked, never multiplied."""
    x = jnp.where(real[:, None], x.astype(jnp.float32), jnp.float32(0))
    return jnp.max(jnp.abs(x), axis=0), jnp.sum(jnp.square(x), axis=0), jnp.sum(real.astype(jnp.int32))
