"""How widely the values of an activation are spread: moments and a histogram, a monoid.

A sample's numbers come from a program that sees that sample alone; the host adds them in float64, in a fixed order.
Counts are integers, so that the histogram is exact in any order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_MANTISSA_BITS: Final = 3
"""Bins of an octave: 2**3, each 1/8 of the octave's lower end wide."""
_SHIFT: Final = 23 - _MANTISSA_BITS
_FIRST_EXPONENT: Final = -40
"""Smaller magnitudes count as zero: they are 1e-12 of what activations are."""
_OCTAVES: Final = 72
BINS: Final = _OCTAVES << _MANTISSA_BITS
"""Of one sign. The last one also holds what is larger."""
_POWERS: Final = 4


@partial(jax.tree_util.register_dataclass, data_fields=["absmax", "powers", "counts"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of all elements alike.

    Invariants: powers[k - 1] == sum x**k, k = 1..4; counts.shape == (2 BINS + 1,): negative values from large to
    small, zeros, positive values from small to large; counts.sum() is the number of elements.
    """

    absmax: Any
    powers: Any
    counts: Any

    @classmethod
    def merge_all(cls, parts: Iterable["Spread"]) -> "Spread":
        """All together, added in the given order; of nothing, that of no elements."""
        total = cls(absmax=np.float32(0), powers=np.zeros(_POWERS), counts=np.zeros(2 * BINS + 1, np.int64))
        for part in parts:
            total = cls(
                absmax=np.maximum(total.absmax, np.asarray(part.absmax, np.float32)),
                powers=total.powers + np.asarray(part.powers, np.float64),
                counts=total.counts + np.asarray(part.counts, np.int64),
            )
        return total

    def arrays(self) -> dict[str, np.ndarray]:
        """For a file; `from_arrays` inverts it."""
        return {name: np.asarray(getattr(self, name)) for name in ("absmax", "powers", "counts")}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Spread":
        """What `arrays` gave."""
        return cls(**arrays)

    @property
    def elements(self) -> int:
        """How many values were seen."""
        return int(np.sum(self.counts))

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 of nothing."""
        return float(np.sqrt(self._central()[0]))

    def std_ratio(self) -> float | None:
        """Largest magnitude in standard deviations; None: all values are alike. Source: msModelSlim, metric std."""
        deviation = self.deviation
        return float(self.absmax) / deviation if deviation > 0 else None

    def kurtosis(self) -> float | None:
        """Excess kurtosis, 0 of a normal distribution; None: all values are alike."""
        second, fourth = self._central()
        return fourth / second**2 - 3 if second > 0 else None

    def quantile_ratio(self) -> float | None:
        """An INT8 step of the whole range in interquartile ranges; None: half of all values are alike.

        Source: msModelSlim, metric quantile: (2 absmax / 254) / (Q3 - Q1).
        """
        between = self.quantile(0.75) - self.quantile(0.25)
        return 2 * float(self.absmax) / 254 / between if between > 0 else None

    def quantile(self, share: float) -> float:
        """The value below which a share of all values lies, to within its bin (1/8 of its size); 0 of nothing."""
        counts = np.asarray(self.counts)
        total = counts.sum()
        if not total:
            return 0.0
        before = np.concatenate([[0], np.cumsum(counts)])
        wanted = share * total
        # The first bin that ends at or after the wanted place and is not empty.
        index = int(np.searchsorted(before[1:], wanted, side="left"))
        index += int(np.argmax(counts[index:] > 0))
        low, high = _edges(index)
        inside = (wanted - before[index]) / counts[index]
        return float(low + (high - low) * min(max(inside, 0.0), 1.0))

    def _central(self) -> tuple[float, float]:
        """Second and fourth central moment."""
        count = self.elements
        if not count:
            return 0.0, 0.0
        first, second, third, fourth = (np.asarray(self.powers, np.float64) / count).tolist()
        variance = second - first**2
        if variance <= 1e-12 * second:
            return 0.0, 0.0
        return variance, fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4


def spread_of(x: Float[Array, "tokens channels"], real: Bool[Array, " tokens"]) -> tuple[Spread, Int[Array, ""]]:
    """Of the real rows of one sample; the second result is an exponent: powers[k-1] stands for 2**(k e) as much.

    Powers of values near one neither overflow nor vanish in float32; `rescaled` puts the exponent back in float64.
    """
    x = jnp.where(real[:, None], x.astype(jnp.float32), jnp.float32(0))
    absmax = jnp.max(jnp.abs(x))
    exponent = jnp.where(absmax > 0, jnp.frexp(absmax)[1], 0).astype(jnp.int32)
    unit = jnp.ldexp(x, -exponent)
    square = jnp.square(unit)
    powers = jnp.stack([jnp.sum(unit), jnp.sum(square), jnp.sum(square * unit), jnp.sum(jnp.square(square))])
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    first = (_FIRST_EXPONENT + 127) << _MANTISSA_BITS
    place = jnp.clip((bits >> _SHIFT) - first, -1, BINS - 1)
    index = jnp.where(place < 0, BINS, jnp.where(x < 0, BINS - 1 - place, BINS + 1 + place))
    # Padding goes nowhere.
    index = jnp.where(real[:, None], index, 2 * BINS + 1)
    counts = jnp.zeros(2 * BINS + 1, jnp.int32).at[index.reshape(-1)].add(1, mode="drop")
    return Spread(absmax=absmax, powers=powers, counts=counts), exponent


def rescaled(spread: Spread, exponent: Any) -> Spread:
    """A sample's spread on the host, its powers in float64 and as large as they are."""
    factor = np.exp2(int(exponent) * np.arange(1.0, 1 + _POWERS))
    return Spread(
        absmax=np.asarray(spread.absmax, np.float32),
        powers=np.asarray(spread.powers, np.float64) * factor,
        counts=np.asarray(spread.counts, np.int64),
    )


def _edges(index: int) -> tuple[float, float]:
    """Where a bin of `counts` begins and ends."""
    if index == BINS:
        return 0.0, 0.0
    place = index - BINS - 1 if index > BINS else BINS - 1 - index
    octave, part = divmod(place, 1 << _MANTISSA_BITS)
    base = 2.0 ** (_FIRST_EXPONENT + octave)
    low, high = (base * (1 + (part + more) / (1 << _MANTISSA_BITS)) for more in (0, 1))
    return (low, high) if index > BINS else (-high, -low)
