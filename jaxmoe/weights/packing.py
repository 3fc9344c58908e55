"""Numbers that numpy has no type for: four-bit integers, FP4, FP8 and power-of-two scales, read into its own types."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from jaxtyping import Float32, Int8, Integer, UInt8

Decode = Callable[[np.ndarray], np.ndarray]
"""[rows, bytes] uint8 -> [rows, columns] float32."""

_CHUNK_ELEMENTS: Final = 1 << 16
"""Elements decoded at a time: their temporaries stay in a core's cache."""
_FP4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP8_BIAS: Final = np.float32(2.0**120)
"""127 - 7: what turns the exponent bits of an e4m3 number into those of a float32."""


def pairs_to_int8(pairs: UInt8[np.ndarray, "*lead pairs"], group: int) -> Int8[np.ndarray, "*lead twice"]:
    """The integers of our own 4-bit weights, whose form `quant.int4` describes; the last group may be short."""
    half = group // 2
    parts = []
    for start in range(0, pairs.shape[-1], half):
        nibbles = pairs[..., start : start + half]
        parts += [nibbles & np.uint8(15), nibbles >> np.uint8(4)]
    values = np.concatenate(parts, axis=-1).view(np.int8)
    values ^= np.int8(8)
    values -= np.int8(8)
    return values


def int8_to_pairs(values: Int8[np.ndarray, "*lead in"], group: int) -> UInt8[np.ndarray, "*lead pairs"]:
    """Inverse of `pairs_to_int8`; values are -8..7, an even number in each group."""
    out = np.empty((*values.shape[:-1], values.shape[-1] // 2), np.uint8)
    for low, high, stored in _halves(values.shape[-1], group):
        np.left_shift(values[..., high].view(np.uint8), 4, out=out[..., stored])
        out[..., stored] |= values[..., low].view(np.uint8) & np.uint8(15)
    return out


def rows_to_int8(packed: UInt8[np.ndarray, "*lead packed_rows in"]) -> Int8[np.ndarray, "*lead rows in"]:
    """The integers of bytes whose low nibbles are one row and whose high nibbles are the next, two's complement."""
    *lead, count, size = packed.shape
    out = np.empty((*lead, 2 * count, size), np.int8)
    out[..., 0::2, :] = (packed << np.uint8(4)).view(np.int8) >> np.int8(4)
    out[..., 1::2, :] = packed.view(np.int8) >> np.int8(4)
    return out


def rows_to_pairs(
    packed: UInt8[np.ndarray, "*lead packed_rows in"], group: int
) -> UInt8[np.ndarray, "*lead rows pairs"]:
    """`int8_to_pairs(rows_to_int8(packed), group)` without the integers between: nibbles only move.

    Args:
        packed: two rows in each row of bytes.
        group: elements per scale of the result, even.
    """
    *lead, count, size = packed.shape
    out = np.empty((*lead, 2 * count, size // 2), np.uint8)
    flat, flat_out = packed.reshape(-1, size), out.reshape(-1, 2, size // 2)
    step = max(1, _CHUNK_ELEMENTS // max(1, size))
    for start in range(0, len(flat), step):
        some = slice(start, start + step)
        for low, high, stored in _halves(size, group):
            first, second = flat[some, low], flat[some, high]
            np.bitwise_or(first & np.uint8(15), second << np.uint8(4), out=flat_out[some, 0, stored])
            np.bitwise_or(first >> np.uint8(4), second & np.uint8(240), out=flat_out[some, 1, stored])
    return out


def _halves(size: int, group: int) -> Iterator[tuple[slice, slice, slice]]:
    """For each group of an axis (its elements in low nibbles, those in high nibbles, its bytes)."""
    for start in range(0, size, group):
        half = min(group, size - start) // 2
        yield (
            slice(start, start + half),
            slice(start + half, start + 2 * half),
            slice(start // 2, start // 2 + half),
        )


def fp8_to_float(codes: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Values of e4m3fn numbers (four exponent bits, no infinities, 127 and 255 are NaN).

    The bits are put where a float32 has them, and a product moves the exponent: 10 times as fast as a cast.
    """
    bits = (codes & np.uint8(127)).astype(np.uint32)
    bits <<= 20
    sign = (codes & np.uint8(128)).astype(np.uint32)
    sign <<= 24
    bits |= sign
    values = bits.view(np.float32)
    values *= _FP8_BIAS
    values[(codes & np.uint8(127)) == 127] = np.nan
    return values


def _pairs(of_nibble: Float32[np.ndarray, "16"]) -> np.ndarray:
    """For each byte the values of its low and its high nibble, as one number of 8 bytes."""
    codes = np.arange(256)
    return np.stack([of_nibble[codes & 15], of_nibble[codes >> 4]], axis=-1).view(np.uint64)[:, 0]


_FP4_PAIRS: Final = _pairs(np.concatenate([_FP4, -_FP4]))
_OFFSET_PAIRS: Final = _pairs(np.arange(16, dtype=np.float32) - 8)


def fp4_to_float(packed: UInt8[np.ndarray, "rows bytes"]) -> Float32[np.ndarray, "rows twice"]:
    """Values of e2m1 numbers, two a byte, the low nibble first: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    return np.take(_FP4_PAIRS, packed).view(np.float32)


def offset_int4_to_float(packed: UInt8[np.ndarray, "rows bytes"]) -> Float32[np.ndarray, "rows twice"]:
    """Values of nibbles that store an integer plus 8, the low nibble first."""
    return np.take(_OFFSET_PAIRS, packed).view(np.float32)


def powers_of_two(codes: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """2 ** (code - 127), the scales of the MX formats; 255 is NaN. Source: OCP Microscaling Formats 1.0, table 7."""
    table = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
    return table[codes]


def decode_scaled(
    codes: UInt8[np.ndarray, "*lead rows bytes"],
    decode: Decode,
    columns: slice,
    scales: Float32[np.ndarray, "*lead scale_rows scale_columns"],
    row_groups: Integer[np.ndarray, "rows"],
    column_groups: Integer[np.ndarray, "columns"],
) -> Float32[np.ndarray, "*lead rows columns"]:
    """`decode(codes)[.., columns] * scales[.., row_groups, column_groups]`, a few rows at a time; it may overflow.

    Args:
        codes: bytes of whole rows.
        decode: turns bytes of some rows into float32.
        columns: which of the decoded columns.
        scales: one for each group of rows and columns.
        row_groups: row of `scales` for each row.
        column_groups: column of `scales` for each column that `columns` selects.
    """
    *lead, rows, width = codes.shape
    flat, flat_scales = codes.reshape(-1, rows, width), scales.reshape(-1, *scales.shape[-2:])
    out = np.empty((len(flat), rows, len(column_groups)), np.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    for index, (matrix, matrix_scales) in enumerate(zip(flat, flat_scales, strict=True)):
        for start in range(0, rows, step):
            some = slice(start, start + step)
            spread = np.take(matrix_scales[row_groups[some]], column_groups, axis=1)
            with np.errstate(over="ignore"):
                np.multiply(decode(matrix[some])[:, columns], spread, out=out[index, some])
    return out.reshape(*lead, rows, len(column_groups))
