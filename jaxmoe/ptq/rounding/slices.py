"""What the methods share: groups of the input axis as slices, and scales as factors of the min/max scale.

A slice is looked at in units of its min/max scale, `units = x / scale`, so that magnitudes of weights neither overflow
nor vanish when errors are squared, and a method only chooses a factor near 1 for each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
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


def one_by_one(
    run: Callable[[jax.Array, jax.Array], Rounded], weight: Shaped[Array, "*lead out in"], statistic: jax.Array
) -> Rounded:
    """`run(weight [out, in], statistic)` for each weight of the leading axes or of a vmap, in a loop on the device.

    Not vmap: over another number of weights, or none, it is another program, which sums in another order, and a scale
    moves by an ulp. So an expert comes out alike whatever is rounded beside it, on one device or spread over many. A
    weight is large enough to keep a device busy.
    """
    one = sequential_vmap(run)
    for _ in weight.shape[:-2]:
        one = jax.vmap(one)
    return one(weight, statistic)


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


def each_with_importance(
    run: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    weight: Float[Array, "*lead out in"],
    importance: Float[Array, "*lead in"] | None,
    group: int,
) -> Rounded:
    """`run(slices [out, groups, group], importance [1, groups, group])` for each weight; no importance is all ones."""
    *lead, _, size = weight.shape
    if importance is None:
        importance = jnp.ones((*lead, size), jnp.float32)

    def one(weight: jax.Array, importance: jax.Array) -> Rounded:
        q, scale = run(split_groups(weight, group), split_groups(importance, group)[None])
        return Rounded(qvalue=join_groups(q, size), scale=scale, status=jnp.int32(0))

    return one_by_one(one, weight, importance)


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
