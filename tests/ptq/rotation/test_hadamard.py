"""Block rotations: they are the matrices they say, orthogonal, and a block's bits depend on that block alone."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.rotation.hadamard import (
    Rotation,
    largest_block,
    make_rotation,
    rotate_,
)
from tests.tolerances import TOLERANCES

_WIDTHS = st.integers(1, 48).map(lambda half: 2 * half)
_SEEDS = st.integers(0, 2**31).map(lambda seed: (seed, 0))


def dense(rotation: Rotation) -> np.ndarray:
    """R as a float64 matrix, by Sylvester's construction."""
    steps = rotation.block.bit_length() - 1
    hadamard = functools.reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * steps, np.ones((1, 1)))
    blocks = np.kron(np.eye(rotation.size // rotation.block), hadamard) / np.sqrt(rotation.block)
    return rotation.signs().astype(np.float64)[:, None] * blocks


def turned(x: np.ndarray, rotation: Rotation, **where: int) -> np.ndarray:
    y = x.copy()
    rotate_(y, rotation, **where)
    return y


def bound(x: np.ndarray) -> float:
    """Absolute error of what became of x."""
    return float(TOLERANCES["rotation"].value * np.linalg.norm(x))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("width", "block"), [(576, 64), (7168, 1024), (2880, 64), (64, 64), (6, 2), (4096, 4096)])
def test_largest_block(width: int, block: int) -> None:
    assert largest_block(width) == block == make_rotation(width, (1,)).block


@given(width=_WIDTHS, seed=_SEEDS)
def test_is_orthogonal(width: int, seed: tuple[int, int]) -> None:
    matrix = dense(make_rotation(width, seed))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), rtol=0, atol=1e-14)


@given(width=_WIDTHS, seed=_SEEDS)
def test_is_its_matrix(width: int, seed: tuple[int, int]) -> None:
    rotation, x = make_rotation(width, seed), normal(5, width)
    np.testing.assert_allclose(turned(x, rotation), x.astype(np.float64) @ dense(rotation), rtol=0, atol=bound(x))


@pytest.mark.parametrize(("width", "block"), [(576, 64), (576, 2), (7168, 1024)])
def test_the_transpose_turns_back(width: int, block: int) -> None:
    rotation, x = make_rotation(width, (4, 0), block), normal(3, width)
    y = turned(x, rotation)
    assert np.abs(y - x).max() > 1
    np.testing.assert_allclose(y.astype(np.float64) @ dense(rotation).T, x, rtol=0, atol=bound(x))


def test_without_signs_it_is_an_involution() -> None:
    rotation, x = make_rotation(96, (4, 0)), normal(3, 96)
    signs = rotation.signs()
    # R = S H, so that H x = R (S x).
    once = turned(x * signs, rotation)
    twice = turned(once * signs, rotation)
    np.testing.assert_allclose(twice, x, rtol=0, atol=bound(x))


@given(width=_WIDTHS, data=st.data())
def test_some_blocks_have_the_bits_of_the_whole(width: int, data: st.DataObject) -> None:
    rotation, x = make_rotation(width, (7, 1)), normal(4, 2 * width)
    blocks = 2 * width // rotation.block
    first = data.draw(st.integers(0, blocks - 1))
    last = data.draw(st.integers(first + 1, blocks))
    columns = slice(first * rotation.block, last * rotation.block)
    whole = turned(x, rotation)
    np.testing.assert_array_equal(turned(x[:, columns], rotation, first=columns.start), whole[:, columns])
    # Another block's values change nothing.
    x[:, : columns.start] += 1
    x[:, columns.stop :] -= 1
    np.testing.assert_array_equal(turned(x, rotation)[:, columns], whole[:, columns])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_any_axis_and_any_view(axis: int) -> None:
    rotation, x = make_rotation(24, (7, 1)), normal(24, 24, 24)
    expected = np.moveaxis(turned(np.ascontiguousarray(np.moveaxis(x, axis, -1)), rotation), -1, axis)
    np.testing.assert_array_equal(turned(x, rotation, axis=axis), expected)
    wide = normal(24, 50, 24)
    wide[:, 1:49:2] = x
    rotate_(wide[:, 1:49:2], rotation, axis=axis)
    np.testing.assert_array_equal(wide[:, 1:49:2], expected)
    np.testing.assert_array_equal(wide[:, 0::2], normal(24, 50, 24)[:, 0::2])


def test_spreads_an_outlier_over_its_block_alone() -> None:
    rotation, x = make_rotation(576, (1, 0)), np.zeros((1, 576), np.float32)
    x[0, 70] = 8
    y = turned(x, rotation)[0]
    np.testing.assert_array_equal(np.abs(y[64:128]), 1)
    assert not y[:64].any() and not y[128:].any()


def test_signs_are_these_forever() -> None:
    """A rotated checkpoint can only be made again if they never change."""
    signs = make_rotation(16, (1, 0)).signs()
    assert "".join("+" if sign > 0 else "-" for sign in signs) == "++-+--+-+-++-+--"
    assert (signs != make_rotation(16, (2, 0)).signs()).any() and (signs != make_rotation(16, (1, 1)).signs()).any()


@pytest.mark.parametrize(
    ("width", "block", "message"),
    [
        (9, None, "rotation: 9 channels in blocks of 1 cannot be rotated; the width is odd"),
        (64, 1, "64 channels in blocks of 1 cannot be rotated; choose a power of two"),
        (96, 24, "96 channels in blocks of 24 cannot be rotated; choose a power of two"),
        (64, -2, "64 channels in blocks of -2 cannot be rotated"),
        (576, 128, "576 channels are no multiple of the block 128; choose a power of two up to 64"),
    ],
)
def test_refuses(width: int, block: int | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_rotation(width, (0,), block)
