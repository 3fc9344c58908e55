"""The integer grids: symmetric, round half to even, one positive finite scale per slice, values in INT8 arrays.

A grid of 8 bits has values -127..127, one of 4 bits -7..7; its largest magnitude is `limit = 2**(bits - 1) - 1`. Two
multiplications instead of divisions make it reproducible: `scale = amax * (1/limit)` and `q = rint(x * (limit/amax))`,
all in float32, are what every implementation (numpy, XLA, native) computes.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Shaped

from jaxmoe.quant.scheme import Bits

QMAX: Final = 127
"""Largest magnitude of 8 bits; -128 is not used, so that the grid is symmetric."""
QMAX_OF_4: Final = 7
"""Likewise of 4 bits, without -8."""
_LIMIT: Final[dict[Bits, int]] = {4: QMAX_OF_4, 8: QMAX}
_INVERSE_LIMIT: Final[dict[Bits, np.float32]] = {4: np.float32(1 / 7), 8: np.float32(1 / 127)}
SMALLEST: Final = np.float32(1e-30)
"""Slices whose largest magnitude is below this are all zero on the grid (scale 1): 127/amax would overflow."""


def quantize_slices(
    x: Float[Array, "*lead width"], bits: Bits = 8
) -> tuple[Int8[Array, "*lead width"], Float32[Array, "*lead"]]:
    """Quantises along the last axis, one scale per slice: per-token activations, per-token-and-head keys and values.

    A zero slice gives zeros and scale 1. A slice that holds a NaN or an infinity gives zeros and scale NaN, so that the
    damage stays visible in whatever it is multiplied with: casts of NaN to INT8 differ between backends.
    """
    limit = _LIMIT[bits]
    x32 = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x32), axis=-1)
    zero = amax < SMALLEST
    bad = ~jnp.isfinite(amax)
    degenerate = zero | bad
    inverse = limit / jnp.where(degenerate, np.float32(limit), amax)
    grid = jnp.clip(jnp.rint(x32 * inverse[..., None]), -limit, limit)
    q = jnp.where(degenerate[..., None], np.float32(0), grid).astype(jnp.int8)
    scale = jnp.where(bad, np.float32(np.nan), jnp.where(zero, np.float32(1), amax * _INVERSE_LIMIT[bits]))
    return q, scale


def dequantize_slices(q: Int8[Array, "*lead width"], scale: Float32[Array, "*lead"]) -> Float32[Array, "*lead width"]:
    """Inverse of `quantize_slices` up to half a step: `q * scale`."""
    return q.astype(jnp.float32) * scale[..., None]


def quantize_groups(
    weight: Float[Array, "*lead in"], group: int, bits: Bits = 8
) -> tuple[Int8[Array, "*lead in"], Float32[Array, "*lead groups"]]:
    """Quantises a weight to nearest along its input axis, one scale per `group` elements; the last group may be short.

    The padding of a short last group never takes part in its maximum.
    """
    size = weight.shape[-1]
    groups = -(-size // group)
    pad = [(0, 0)] * (weight.ndim - 1) + [(0, groups * group - size)]
    padded = jnp.pad(weight.astype(jnp.float32), pad).reshape(*weight.shape[:-1], groups, group)
    q, scale = quantize_slices(padded, bits)
    return q.reshape(*weight.shape[:-1], groups * group)[..., :size], scale


def expand_groups(scale: Shaped[Array, "*lead groups"], group: int, size: int) -> Shaped[Array, "*lead in"]:
    """Repeats each group's scale over its elements and cuts the last group to `size` in all."""
    return jnp.repeat(scale, group, axis=-1)[..., :size]
