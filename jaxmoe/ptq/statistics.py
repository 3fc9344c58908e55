"""Statistics of a linear layer's input: what smoothing and weighted rounding need.

A sample's numbers come from a program that sees that sample alone. Samples belong to a fixed number of virtual shards;
the host adds them in float64, in order within a shard and shard by shard after that: the result has the same bytes
however many devices or processes ran them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float


@partial(jax.tree_util.register_dataclass, data_fields=["absmax", "squares", "count", "gram"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """A monoid: `merge` is associative for `absmax` and `count`, and exact in a fixed order for the sums.

    Invariants: absmax.shape == squares.shape == (channels,); gram.shape == (channels, channels), and its diagonal is
    squares; count is a number.
    """

    absmax: Any
    squares: Any
    """Sum of squares."""
    count: Any
    """Tokens seen."""
    gram: Any | None = None
    """Sum of x x^T, if asked for."""

    @classmethod
    def merge_all(cls, parts: Iterable["InputStats"]) -> "InputStats":
        """The statistics of all samples, added in the given order.

        Raises:
            ValueError: there are none.
        """
        total: InputStats | None = None
        for part in parts:
            total = part.widened() if total is None else total.merge(part)
        if total is None:
            raise ValueError("no statistics to merge: there are no samples")
        return total

    def widened(self) -> "InputStats":
        """The same in float64 and int64."""
        return InputStats(
            absmax=np.asarray(self.absmax, np.float32),
            squares=np.asarray(self.squares, np.float64),
            count=np.asarray(self.count, np.int64),
            gram=None if self.gram is None else np.asarray(self.gram, np.float64),
        )

    def merge(self, other: "InputStats") -> "InputStats":
        """Both together; a Gram matrix only if both have one."""
        wide = other.widened()
        return InputStats(
            absmax=np.maximum(self.absmax, wide.absmax),
            squares=self.squares + wide.squares,
            count=np.asarray(self.count + wide.count),
            gram=None if self.gram is None or wide.gram is None else self.gram + wide.gram,
        )

    def mean_square(self) -> np.ndarray:
        """E[x^2] per channel, float64; zero where nothing was seen."""
        return self.squares / max(1, int(self.count))

    def mean_gram(self) -> np.ndarray:
        """E[x x^T], float64; zero where nothing was seen."""
        assert self.gram is not None, "no Gram matrix was asked for"
        return self.gram / max(1, int(self.count))

    def arrays(self) -> dict[str, np.ndarray]:
        """For a file; `from_arrays` inverts it."""
        fields = {"absmax": self.absmax, "squares": self.squares, "count": self.count, "gram": self.gram}
        return {name: np.asarray(array) for name, array in fields.items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "InputStats":
        """What `arrays` gave."""
        return cls(**arrays)


def input_stats(x: Float[Array, "tokens channels"], real: Bool[Array, " tokens"], *, gram: bool) -> InputStats:
    """Of the real rows of one sample, in float32; padding is masked, never multiplied."""
    x = jnp.where(real[:, None], x.astype(jnp.float32), jnp.float32(0))
    product = lax.dot_general(x, x, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST) if gram else None
    return InputStats(
        absmax=jnp.max(jnp.abs(x), axis=0),
        squares=jnp.sum(jnp.square(x), axis=0),
        count=jnp.sum(real.astype(jnp.int32)),
        gram=product,
    )
