"""What the methods share: groups of the input axis as slices, and scales as factors of the min/max scale.

A slice is looked at in units of its min/max scale, `units = x / scale`, so that magnitudes of weights neither overflow
nor vanish when errors are squared, and a method only chooses a factor near 1 for each.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Shaped

from jaxmoe.quant.int8 import quantize_slices
from jaxmoe.quant.scheme import Bits


@partial(jax.tree_util.register_dataclass, data_fields=["qvalue", "scale", "status"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """Integers not yet packed, their scales, and how it went.

    Invariants: qvalue is int8 [*lead, out, in] within -127..127 or -7..7; scale is float32 [*lead, out, groups],
    positive and finite, or NaN where what it was made from is not finite (its integers are then 0); status is int32
    [*lead], see gptq, and 0 where a method has nothing to tell.
    """

    qvalue: Any
    scale: Any
    status: Any


def split_groups(x: Float[Array, "*lead in"], group: int) -> Float32[Array, "*lead groups group"]:
    """One slice per group in float32; zeros fill a short last one, and a zero weight never takes part in anything."""
    *lead, size = x.shape
    groups = -(-size // group)
    pad = [(0, 0)] * len(lead) + [(0, groups * group - size)]
    return jnp.pad(x.astype(jnp.float32), pad).reshape(*lead, groups, group)


def join_groups(x: Shaped[Array, "*lead groups group"], size: int) -> Shaped[Array, "*lead in"]:
    """Inverse of `split_groups`."""
    *lead, groups, group = x.shape
    return x.reshape(*lead, groups * group)[..., :size]


def importance_slices(
    importance: Float[Array, "*lead in"] | None, weight: Float[Array, "*lead out in"], group: int
) -> Float32[Array, "*lead 1 groups group"]:
    """The importance of each element of `split_groups(weight, group)`, the same for all rows; None: all ones."""
    if importance is None:
        importance = jnp.ones((*weight.shape[:-2], weight.shape[-1]), jnp.float32)
    return split_groups(importance, group)[..., None, :, :]


def on_grid(
    units: Float32[Array, "*lead width"], factor: Float32[Array, "*lead"], bits: Bits
) -> Float32[Array, "*lead width"]:
    """The nearest values of the grid whose scale is `factor`, still in float32; beyond its end, the end."""
    limit = 2 ** (bits - 1) - 1
    return jnp.clip(jnp.rint(units / factor[..., None]), -limit, limit)


def weighted_error(
    units: Float32[Array, "*lead width"],
    grid: Float32[Array, "*lead width"],
    factor: Float32[Array, "*lead"],
    importance: Float32[Array, "*broadcast width"],
) -> Float32[Array, "*lead"]:
    """`sum(importance * (units - factor * grid)**2)` of each slice."""
    return jnp.sum(importance * jnp.square(units - factor[..., None] * grid), axis=-1)


def with_factor(
    x: Float32[Array, "*lead width"],
    factor: Float32[Array, "*lead"],
    importance: Float32[Array, "*broadcast width"],
    bits: Bits,
) -> tuple[Int8[Array, "*lead width"], Float32[Array, "*lead"]]:
    """The slices rounded with `factor` times their min/max scale; factor 1 is `quantize_slices` bit for bit.

    A slice or an importance that is not finite gives zeros and scale NaN.
    """
    q, scale = quantize_slices(x, bits)
    finite = jnp.isfinite(scale) & jnp.all(jnp.isfinite(importance), axis=-1)
    moved = finite & (factor != 1)
    grid = on_grid(jnp.where(moved[..., None], x / scale[..., None], np.float32(0)), factor, bits)
    # Not `x / scale` for all: quantize_slices multiplies by the inverse, which breaks some ties the other way.
    q = jnp.where(moved[..., None], grid.astype(jnp.int8), q)
    return (
        jnp.where(finite[..., None], q, jnp.int8(0)),
        jnp.where(finite, scale * factor, np.float32(np.nan)),
    )
