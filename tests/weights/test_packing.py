"""Number formats against other implementations of them: every code, exactly."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.quant.int4 import pack_pairs
from jaxmoe.weights.packing import (
    decode_scaled,
    fp4_to_float,
    fp8_to_float,
    int8_to_pairs,
    offset_int4_to_float,
    pairs_to_int8,
    powers_of_two,
    rows_to_int8,
    rows_to_pairs,
)

CODES = np.arange(256, dtype=np.uint8)


def test_every_fp8_code() -> None:
    expected = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(fp8_to_float(CODES), expected)
    assert np.signbit(fp8_to_float(CODES)[128]) and np.isnan(expected[[127, 255]]).all()


def test_every_pair_of_fp4_codes() -> None:
    """ml_dtypes has e2m1 numbers too, one a byte."""
    low, high = (codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn) for codes in (CODES & 15, CODES >> 4))
    expected = np.stack([low, high], axis=-1).astype(np.float32)
    np.testing.assert_array_equal(fp4_to_float(CODES[:, None]), expected)


def test_every_pair_of_offset_integers() -> None:
    expected = [[code % 16 - 8, code // 16 - 8] for code in range(256)]
    np.testing.assert_array_equal(offset_int4_to_float(CODES[:, None]), expected)


def test_every_power_of_two() -> None:
    expected = CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(powers_of_two(CODES), expected)
    assert powers_of_two(CODES)[[0, 127, 254]].tolist() == [2.0**-127, 1, 2.0**127]


@pytest.mark.parametrize(("size", "group"), [(64, 32), (64, 64), (40, 32), (2, 2), (34, 32), (130, 128)])
def test_our_own_pairs(size: int, group: int) -> None:
    values = np.random.default_rng(size).integers(-8, 8, (3, 5, size)).astype(np.int8)
    pairs = np.asarray(pack_pairs(jnp.asarray(values), group))
    np.testing.assert_array_equal(pairs_to_int8(pairs, group), values)
    np.testing.assert_array_equal(int8_to_pairs(values, group), pairs)


def test_every_pair_of_rows() -> None:
    values = rows_to_int8(CODES[None])
    signed = [[(code + 8) % 16 - 8 for code in half] for half in ((CODES % 16).tolist(), (CODES // 16).tolist())]
    np.testing.assert_array_equal(values, signed)


@pytest.mark.parametrize("chunk", [1, 150, 1 << 16])
@pytest.mark.parametrize(("size", "group"), [(64, 64), (64, 32), (40, 32), (2, 2)])
def test_rows_become_pairs(size: int, group: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time or all: as if each number had been taken out and put back."""
    monkeypatch.setattr("jaxmoe.weights.packing._CHUNK_ELEMENTS", chunk)
    packed = np.random.default_rng(size).integers(0, 256, (3, 5, size), np.uint8)
    found = rows_to_pairs(packed, group)
    np.testing.assert_array_equal(pairs_to_int8(found, group), rows_to_int8(packed))
    assert found.shape == (3, 10, size // 2)


def test_decoding_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (2, 7, 12), np.uint8)
    scales = rng.random((2, 3, 4)).astype(np.float32)
    rows, columns = np.array([0, 0, 1, 1, 2, 2, 2]), np.array([0, 1, 1, 3])
    expected = codes.view(ml_dtypes.float8_e4m3fn)[..., 1:9:2].astype(np.float32) * scales[:, rows][..., columns]
    for chunk in (1, 24, 25, 1 << 16):
        monkeypatch.setattr("jaxmoe.weights.packing._CHUNK_ELEMENTS", chunk)
        found = decode_scaled(codes, fp8_to_float, slice(1, 9, 2), scales, rows, columns)
        np.testing.assert_array_equal(found, expected)
