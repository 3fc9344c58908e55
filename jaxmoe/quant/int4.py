"""Pairs: two values of the 4-bit grid in a byte, the form of a 4-bit weight on disk and in memory.

Each group of the input axis (a whole row, where that has one scale) is stored in bytes of its own, half as many as it
has elements. The low nibble of byte i is element i of the group, the high nibble is element `width / 2 + i`, both in
two's complement. So a group is taken apart by two shifts and a concatenation, a byte belongs to one row, and slices
along other axes are slices of bytes.

Not `jnp.int4`: XLA widens it on CPU before anything else (jax 0.10.2), a whole stack of experts for a loop that reads
them one by one. Measured on two Zen 5 cores, W4A8-g128, next to INT8 weights of the same shape:
    [64, 2048] x [4096, 2048]       INT8 3.1 ms, pairs 3.4, jnp.int4 widened 6.2, INT8 x INT4 `dot_general` 26
    16 of 32 experts [1024, 2048]   INT8 8.0 ms, pairs 8.5, jnp.int4 widened 29 and a temporary of twice its stack
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int8, UInt8


def pack_pairs(values: Int8[Array, "*lead in"], group: int) -> UInt8[Array, "*lead pairs"]:
    """Stores values -8..7 in half the bytes.

    Args:
        values: an even number along the last axis.
        group: elements per scale, even; the last group may be shorter.
    """
    return _join([_pack(part) for part in _groups(values, group)])


def unpack_pairs(pairs: UInt8[Array, "*lead pairs"], group: int) -> Int8[Array, "*lead in"]:
    """Inverse of `pack_pairs`."""
    return _join([unpack_group(part) for part in _groups(pairs, group // 2)])


def unpack_group(pairs: UInt8[Array, "*lead pairs"]) -> Int8[Array, "*lead width"]:
    """The values of one group, whole or short."""
    signed = lax.bitcast_convert_type(pairs, jnp.int8)
    return jnp.concatenate([(signed << 4) >> 4, signed >> 4], axis=-1)


def _pack(values: Int8[Array, "*lead width"]) -> UInt8[Array, "*lead pairs"]:
    low, high = jnp.split(lax.bitcast_convert_type(values, jnp.uint8), 2, axis=-1)
    return (low & 15) | (high << 4)


def _groups(x: jax.Array, width: int) -> list[jax.Array]:
    """[..., count, width] of the whole groups and [..., 1, rest] of a short last one; what is empty is left out."""
    *lead, size = x.shape
    count = size // width
    parts = [x[..., : count * width].reshape(*lead, count, width), x[..., None, count * width :]]
    return [part for part in parts if part.shape[-1] and part.shape[-2]]


def _join(parts: list[jax.Array]) -> jax.Array:
    """Inverse of `_groups`."""
    return jnp.concatenate([part.reshape(*part.shape[:-2], part.shape[-2] * part.shape[-1]) for part in parts], axis=-1)
