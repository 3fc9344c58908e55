"""Laws of the 4-bit grid and of its pairs: half a step of error, packing that loses nothing, groups that stay apart."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxmoe.ops.linear import reference
from jaxmoe.quant.int4 import pack_pairs, unpack_group, unpack_pairs
from jaxmoe.quant.int8 import QMAX_OF_4, SMALLEST, quantize_groups, quantize_slices
from tests.tolerances import TOLERANCES

HALF_STEP = np.float32(0.5 + TOLERANCES["int8_half_step"].value)

# Few shapes, since each one compiles: one group, several, ragged ones, and groups as wide as the axis.
SHAPES = [((1, 2), 2), ((3, 14), 4), ((2, 64), 32), ((4, 5, 40), 32), ((2, 300), 128)]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
weights = st.sampled_from(SHAPES).flatmap(
    lambda case: st.tuples(hnp.arrays(np.float32, case[0], elements=finite), st.just(case[1]))
)
integers = st.sampled_from(SHAPES).flatmap(
    lambda case: st.tuples(hnp.arrays(np.int8, case[0], elements=st.integers(-8, 7)), st.just(case[1]))
)

quantize = jax.jit(partial(quantize_slices, bits=4))
quantize_in_groups = jax.jit(partial(quantize_groups, bits=4), static_argnums=1)
pack = jax.jit(pack_pairs, static_argnums=1)
unpack = jax.jit(unpack_pairs, static_argnums=1)


def numpy_groups(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    q, scale = quantize_in_groups(jnp.asarray(x), group)
    return np.asarray(q), np.asarray(scale)


@given(weights)
def test_error_is_at_most_half_a_step_of_the_group(case: tuple[np.ndarray, int]) -> None:
    x, group = case
    q, scale = numpy_groups(x, group)
    assert q.dtype == np.int8 and scale.dtype == np.float32
    assert np.abs(q).max() <= QMAX_OF_4
    assert (scale > 0).all() and np.isfinite(scale).all()
    step = np.repeat(scale, group, axis=-1)[..., : x.shape[-1]]
    starts = range(0, x.shape[-1], group)
    amax = np.stack([np.abs(x[..., start : start + group]).max(-1) for start in starts], axis=-1)
    near_zero = np.repeat(amax < SMALLEST, group, axis=-1)[..., : x.shape[-1]]
    bound = np.where(near_zero, SMALLEST, step * HALF_STEP)
    assert (np.abs(q.astype(np.float64) * step - x) <= bound).all()


@given(weights)
def test_each_group_is_the_numpy_twin_and_symmetric(case: tuple[np.ndarray, int]) -> None:
    x, group = case
    q, scale = numpy_groups(x, group)
    negated, same = numpy_groups(-x, group)
    np.testing.assert_array_equal(negated, -q)
    np.testing.assert_array_equal(same, scale)
    for index, start in enumerate(range(0, x.shape[-1], group)):
        twin_q, twin_scale = reference.quantize_tokens(x[..., start : start + group], limit=7)
        np.testing.assert_array_equal(q[..., start : start + group], twin_q)
        np.testing.assert_array_equal(scale[..., index], twin_scale)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1.0, 1e20, 3.4028235e38])
def test_the_largest_element_is_7_at_every_magnitude(magnitude: float) -> None:
    q, scale = quantize(np.float32(magnitude) * np.float32([[1, -1, 0.25, 0]]))
    np.testing.assert_array_equal(q, [[7, -7, 2, 0]])
    assert np.isfinite(scale).all() and (np.asarray(scale) > 0).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-31])
def test_zero_slices_give_zeros_and_scale_1(value: float) -> None:
    q, scale = quantize(np.full((3, 14), value, np.float32))
    assert (np.asarray(q) == 0).all() and (np.asarray(scale) == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_case_130_nan_or_infinity_shows_in_the_scale_of_its_group_alone(bad: float) -> None:
    x = np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    clean_q, clean_scale = (array.copy() for array in numpy_groups(x, 32))
    x[1, 35] = bad  # in the short last group
    q, scale = numpy_groups(x, 32)
    assert np.isnan(scale[1, 1]) and (q[1, 32:] == 0).all()
    clean_scale[1, 1] = np.nan
    clean_q[1, 32:] = 0
    np.testing.assert_array_equal(scale, clean_scale)
    np.testing.assert_array_equal(q, clean_q)


@given(integers)
def test_unpacking_inverts_packing(case: tuple[np.ndarray, int]) -> None:
    values, group = case
    pairs = np.asarray(pack(values, group))
    assert pairs.dtype == np.uint8 and pairs.nbytes * 2 == values.nbytes
    np.testing.assert_array_equal(unpack(pairs, group), values)
    np.testing.assert_array_equal(reference.unpack_pairs(pairs, group), values)


@given(st.sampled_from(SHAPES).flatmap(lambda case: st.tuples(hnp.arrays(np.uint8, case[0]), st.just(2 * case[1]))))
def test_packing_inverts_unpacking(case: tuple[np.ndarray, int]) -> None:
    pairs, group = case
    np.testing.assert_array_equal(pack(unpack(pairs, group), group), pairs)


def test_the_layout_of_a_whole_and_a_short_group() -> None:
    values = np.int8([[1, 2, 3, 4, -1, -7]])
    pairs = np.asarray(pack_pairs(jnp.asarray(values), 4))
    np.testing.assert_array_equal(pairs, [[0x31, 0x42, 0x9F]])
    np.testing.assert_array_equal(unpack_group(jnp.asarray(pairs[:, :2])), values[:, :4])
    np.testing.assert_array_equal(unpack_group(jnp.asarray(pairs[:, 2:])), values[:, 4:])


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 64)])
def test_no_rows_pack_to_no_rows(shape: tuple[int, ...]) -> None:
    pairs = pack_pairs(jnp.zeros(shape, jnp.int8), 32)
    assert pairs.shape == (*shape[:-1], shape[-1] // 2)
    assert unpack_pairs(pairs, 32).shape == shape


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("pairs_in_row", [1, 3, 17, 20])
def test_reading_one_matrix_of_a_stack_in_a_loop(rows: int, pairs_in_row: int) -> None:
    """Slices that start at every offset, as the experts operator takes them."""
    stack = np.random.default_rng(2).integers(0, 256, size=(2, 4, rows, pairs_in_row)).astype(np.uint8)

    @jax.jit
    def gather(stack: jax.Array, layer: jax.Array) -> jax.Array:
        def body(expert: jax.Array, out: jax.Array) -> jax.Array:
            return out.at[expert].set(unpack_pairs(stack[layer, expert], 32))

        return jax.lax.fori_loop(0, 4, body, jnp.zeros((4, rows, 2 * pairs_in_row), jnp.int8))

    for layer in range(2):
        np.testing.assert_array_equal(gather(stack, np.int32(layer)), reference.unpack_pairs(stack[layer], 32))
