"""The INT8 grid: symmetric, round half to even, values -127..127, one positive finite scale per slice.

Two multiplications instead of divisions make the grid reproducible: `scale = amax * (1/127)` and
`q = rint(x * (127/amax))`, all in float32, are what every implementation (numpy, XLA, native) computes.
"""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Shaped

QMAX: Final = 127
"""Largest magnitude; -128 is not used, so that the grid is symmetric."""
INVERSE_QMAX: Final = np.float32(1.0 / 127.0)
SMALLEST: Final = np.float32(1e-30)
"""Slices whose largest magnitude is below this are all zero on the grid (scale 1): 127/amax would overflow."""


def quantize_slices(
    x: Float[Array, "*lead width"],
) -> tuple[Int8[Array, "*lead width"], Float32[Array, "*lead"]]:
    """Quantises along the last axis, one scale per slice: per-token activations, per-token-and-head keys and values.

    A zero slice gives zeros and scale 1. A slice that holds a NaN or an infinity gives zeros and scale NaN, so that the
    damage stays visible in whatever it is multiplied with: casts of NaN to INT8 differ between backends.
    """
    x32 = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x32), axis=-1)
    zero = amax < SMALLEST
    bad = ~jnp.isfinite(amax)
    degenerate = zero | bad
    inverse = QMAX / jnp.where(degenerate, np.float32(QMAX), amax)
    grid = jnp.clip(jnp.rint(x32 * inverse[..., None]), -QMAX, QMAX)
    q = jnp.where(degenerate[..., None], np.float32(0), grid).astype(jnp.int8)
    scale = jnp.where(bad, np.float32(np.nan), jnp.where(zero, np.float32(1), amax * INVERSE_QMAX))
    return q, scale


def dequantize_slices(q: Int8[Array, "*lead width"], scale: Float32[Array, "*lead"]) -> Float32[Array, "*lead width"]:
    """Inverse of `quantize_slices` up to half a step: `q * scale`."""
    return q.astype(jnp.float32) * scale[..., None]


def quantize_groups(
    weight: Float[Array, "*lead in"], group: int
) -> tuple[Int8[Array, "*lead in"], Float32[Array, "*lead groups"]]:
    """Quantises a weight to nearest along its input axis, one scale per `group` elements; the last group may be short.

    The padding of a short last group never takes part in its maximum.
    """
    size = weight.shape[-1]
    groups = -(-size // group)
    pad = [(0, 0)] * (weight.ndim - 1) + [(0, groups * group - size)]
    padded = jnp.pad(weight.astype(jnp.float32), pad).reshape(*weight.shape[:-1], groups, group)
    q, scale = quantize_slices(padded)
    return q.reshape(*weight.shape[:-1], groups * group)[..., :size], scale


def expand_groups(scale: Shaped[Array, "*lead groups"], group: int, size: int) -> Shaped[Array, "*lead in"]:
    """Repeats each group's scale over its elements and cuts the last group to `size` in all."""
    return jnp.repeat(scale, group, axis=-1)[..., :size]
