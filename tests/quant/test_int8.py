"""Laws of the INT8 grid: half a step of error, positive finite scales, visible damage, groups that ignore padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxmoe.ops.linear.reference import dequantize, quantize_tokens
from jaxmoe.quant.int8 import (
    QMAX,
    SMALLEST,
    dequantize_slices,
    expand_groups,
    quantize_groups,
    quantize_slices,
)
from tests.tolerances import TOLERANCES

HALF_STEP = np.float32(0.5 + TOLERANCES["int8_half_step"].value)

# Few shapes, since each one compiles; widths off the powers of two and of one element are among them.
shapes = st.sampled_from([(1, 1), (3, 13), (2, 64), (4, 5, 7)])
# Denormals are left out: backends may flush them to zero.
finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
rows = shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=finite))

quantize = jax.jit(quantize_slices)
quantize_in_groups = jax.jit(quantize_groups, static_argnums=1)


def numpy_grid(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, scale = quantize(jnp.asarray(x))
    return np.asarray(q), np.asarray(scale)


def numpy_groups(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    q, scale = quantize_in_groups(jnp.asarray(x), group)
    return np.asarray(q), np.asarray(scale)


@given(rows)
def test_error_is_at_most_half_a_step(x: np.ndarray) -> None:
    q, scale = numpy_grid(x)
    near_zero = np.abs(x).max(-1) < SMALLEST
    error = np.abs(q.astype(np.float64) * scale[..., None] - x)
    bound = np.where(near_zero, SMALLEST, scale * HALF_STEP)
    assert (error <= bound[..., None]).all()


@given(rows)
def test_scales_are_positive_and_finite_and_values_symmetric(x: np.ndarray) -> None:
    q, scale = numpy_grid(x)
    assert q.dtype == np.int8 and scale.dtype == np.float32
    assert (scale > 0).all() and np.isfinite(scale).all()
    assert np.abs(q.astype(np.int32)).max() <= QMAX
    negated, same = numpy_grid(-x)
    np.testing.assert_array_equal(negated, -q)
    np.testing.assert_array_equal(same, scale)


@given(rows)
def test_the_largest_element_of_a_slice_is_127(x: np.ndarray) -> None:
    q, _ = numpy_grid(x)
    expected = np.where(np.abs(x).max(-1) < SMALLEST, 0, QMAX)
    np.testing.assert_array_equal(np.abs(q.astype(np.int32)).max(-1), expected)


@given(rows)
def test_the_numpy_twin_is_equal(x: np.ndarray) -> None:
    q, scale = numpy_grid(x)
    twin_q, twin_scale = quantize_tokens(x)
    np.testing.assert_array_equal(q, twin_q)
    np.testing.assert_array_equal(scale, twin_scale)


@pytest.mark.parametrize("width", [1, 13, 64])
def test_eager_and_jitted_are_equal(width: int) -> None:
    x = np.random.default_rng(5).normal(size=(4, width)).astype(np.float32)
    q, scale = quantize_slices(jnp.asarray(x))
    jit_q, jit_scale = numpy_grid(x)
    np.testing.assert_array_equal(q, jit_q)
    np.testing.assert_array_equal(scale, jit_scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_are_widened_first(dtype: jnp.dtype) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 13)), dtype)
    q, scale = quantize(x)
    wide_q, wide_scale = quantize(x.astype(jnp.float32))
    np.testing.assert_array_equal(q, wide_q)
    np.testing.assert_array_equal(scale, wide_scale)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-31, -1e-31])
def test_zero_slices_give_zeros_and_scale_1(value: float) -> None:
    q, scale = numpy_grid(np.full((3, 13), value, np.float32))
    assert (q == 0).all() and (scale == 1).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e20, 3.4028235e38])
def test_extreme_magnitudes_stay_on_the_grid(magnitude: float) -> None:
    q, scale = numpy_grid(np.float32(magnitude) * np.float32([[1, -1, 0.5, 0]]))
    np.testing.assert_array_equal(q[0, [0, 1, 3]], [127, -127, 0])
    assert abs(int(q[0, 2])) in (63, 64)
    assert np.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 6, 12])
def test_case_130_nan_or_infinity_shows_in_the_scale_and_never_in_a_cast(bad: float, column: int) -> None:
    x = np.random.default_rng(1).normal(size=(3, 13)).astype(np.float32)
    clean_q, clean_scale = numpy_grid(x)
    x[1, column] = bad
    q, scale = numpy_grid(x)
    assert np.isnan(scale[1])
    assert (q[1] == 0).all()
    np.testing.assert_array_equal(q[[0, 2]], clean_q[[0, 2]])
    np.testing.assert_array_equal(scale[[0, 2]], clean_scale[[0, 2]])
    assert np.isnan(np.asarray(dequantize_slices(jnp.asarray(q), jnp.asarray(scale)))[1]).all()
    twin_q, twin_scale = quantize_tokens(x)
    np.testing.assert_array_equal(q, twin_q)
    np.testing.assert_array_equal(scale, twin_scale)


@pytest.mark.parametrize("width", [1, 13, 64])
def test_case_7_zero_row_huge_value_and_row_0(width: int) -> None:
    x = np.random.default_rng(2).normal(size=(4, width)).astype(np.float32)
    x[0] *= 1000  # row 0 has a grid of its own
    x[1] = 0
    x[2, width // 2] = 1e30
    q, scale = numpy_grid(x)
    for row in range(4):
        alone_q, alone_scale = numpy_grid(x[row : row + 1])
        np.testing.assert_array_equal(q[row], alone_q[0])
        assert scale[row] == alone_scale[0]
    assert scale[0] == np.abs(x[0]).max() * np.float32(1 / 127)
    assert scale[1] == 1 and (q[1] == 0).all()
    assert q[2, width // 2] == 127 and np.count_nonzero(q[2]) == 1


@pytest.mark.parametrize(("width", "group"), [(576, 128), (13, 8), (13, 128), (130, 128), (64, 64)])
def test_case_7_padding_of_a_ragged_group_never_changes_a_scale(width: int, group: int) -> None:
    x = np.random.default_rng(3).normal(size=(3, width)).astype(np.float32)
    x[2] = np.abs(x[2]) + 5  # far from the zeros of a padding
    q, scale = numpy_groups(x, group)
    starts = range(0, width, group)
    assert q.shape == x.shape and scale.shape == (3, len(starts))
    for index, start in enumerate(starts):
        part_q, part_scale = quantize_tokens(x[:, start : start + group])
        np.testing.assert_array_equal(q[:, start : start + group], part_q)
        np.testing.assert_array_equal(scale[:, index], part_scale)


def test_case_8_zero_blocks_dequantise_to_exact_zeros() -> None:
    weight = np.random.default_rng(4).normal(size=(2, 4, 576)).astype(np.float32)
    weight[1] = 0  # a whole expert
    weight[0, 2, 128:256] = 0  # one group of a row
    weight[0, 3, 512:] = 0  # the ragged group of a row
    q, scale = numpy_groups(weight, 128)
    assert np.isfinite(scale).all() and (scale > 0).all()
    restored = dequantize(q, scale, 128)
    assert (restored[weight == 0] == 0).all()
    assert (restored[0, 2, :128] != 0).any()


@pytest.mark.parametrize(("size", "group"), [(1, 1), (13, 8), (16, 8), (7, 7), (9, 1)])
def test_each_element_gets_the_scale_of_its_group(size: int, group: int) -> None:
    scale = np.arange(-(-size // group), dtype=np.float32)[None]
    expanded = np.asarray(expand_groups(jnp.asarray(scale), group, size))
    np.testing.assert_array_equal(expanded, [[i // group for i in range(size)]])
