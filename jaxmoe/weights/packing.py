"""Numbers that numpy has no type for: four-bit integers, FP4, FP8 and power-of-two scales, read into its own types."""

from collections.abc import Callable
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
