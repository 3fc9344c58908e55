"""QArray: indexing keeps values and scales together, broken invariants are named, and it passes through JAX's tools."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import RecipeError, WeightsError
from jaxmoe.ops.linear.reference import dequantize, unpack_pairs
from jaxmoe.quant.qarray import QArray, quantize_weight, validate_shapes
from jaxmoe.quant.scheme import Scheme, parse_scheme
from tests.tolerances import TOLERANCES

SHAPE = (2, 3, 5, 576)
W4 = Scheme(weight_bits=4)
widths = pytest.mark.parametrize("scheme", [Scheme(), W4], ids=lambda scheme: scheme.name)


# Jitted, since operations one by one compile one by one.
quantize = jax.jit(quantize_weight, static_argnums=1)
dequantize_jitted = jax.jit(QArray.dequantize, static_argnums=1)


@cache
def stack(scheme: Scheme, shape: tuple[int, ...] = SHAPE) -> tuple[np.ndarray, QArray]:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return weight, quantize(weight, scheme)


def assert_same(first: QArray, second: QArray) -> None:
    assert first.scheme == second.scheme
    np.testing.assert_array_equal(first.qvalue, second.qvalue)
    np.testing.assert_array_equal(first.scale, second.scale)


@pytest.mark.parametrize("group", [32, 128, 256, None])
def test_shapes_and_half_a_step_of_error(group: int | None) -> None:
    weight, array = stack(Scheme(group=group))
    validate_shapes(array, name="w")
    width = 576 if group is None else group
    assert (array.shape, array.ndim, array.dtype, array.group) == (SHAPE, 4, jnp.int8, width)
    restored = np.asarray(dequantize_jitted(array, jnp.float32))
    np.testing.assert_array_equal(restored, dequantize(np.asarray(array.qvalue), np.asarray(array.scale), width))
    step = np.repeat(np.asarray(array.scale), width, axis=-1)[..., :576]
    assert (np.abs(restored - weight) <= step * (0.5 + TOLERANCES["int8_half_step"].value)).all()


@pytest.mark.parametrize("group", [32, 128, 256, None])
def test_4_bits_have_the_shape_of_the_weight_and_half_its_bytes(group: int | None) -> None:
    scheme = Scheme(weight_bits=4, group=group)
    weight, array = stack(scheme)
    validate_shapes(array, name="w")
    width = 576 if group is None else group
    assert (array.shape, array.ndim, array.dtype, array.group) == (SHAPE, 4, jnp.uint8, width)
    assert array.qvalue.nbytes == weight.size // 2
    assert array.qvalue.nbytes + array.scale.nbytes == scheme.stored_bytes(SHAPE)
    integers = unpack_pairs(np.asarray(array.qvalue), width)
    np.testing.assert_array_equal(array.integers(), integers)
    restored = np.asarray(dequantize_jitted(array, jnp.float32))
    np.testing.assert_array_equal(restored, dequantize(integers, np.asarray(array.scale), width))
    step = np.repeat(np.asarray(array.scale), width, axis=-1)[..., :576]
    assert (np.abs(restored - weight) <= step * (0.5 + TOLERANCES["int8_half_step"].value)).all()


@pytest.mark.parametrize("scheme", ["w8a8-g128", "w8a8-channel", "w4a8-g32", "w4a8-g256", "w4a8-channel"])
@pytest.mark.parametrize("size", [576, 40, 2])
def test_the_groups_of_a_weight_are_its_integers(size: int, scheme: str) -> None:
    _, array = stack(parse_scheme(scheme), (2, 3, size))
    parts = [np.asarray(array.group_integers(index)) for index in range(array.scale.shape[-1])]
    assert all(part.shape[-1] == array.group for part in parts[:-1])
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), array.integers())


def test_4_bits_of_an_odd_input_axis_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"shape \(4, 13\) cannot be stored as w4a8-g128"):
        quantize_weight(jnp.ones((4, 13)), W4)


@widths
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantize_casts_last(dtype: jnp.dtype, scheme: Scheme) -> None:
    _, array = stack(scheme)
    restored = dequantize_jitted(array, dtype)
    assert restored.dtype == dtype
    np.testing.assert_array_equal(restored, np.asarray(dequantize_jitted(array, jnp.float32)).astype(dtype))


@widths
@pytest.mark.parametrize("index", [0, -1, (1, 2), slice(0, 1), (slice(None), 1), ...], ids=str)
def test_indexing_slices_values_and_scales_alike(index: object, scheme: Scheme) -> None:
    _, array = stack(scheme)
    part = array[index]
    validate_shapes(part, name="part")
    np.testing.assert_array_equal(part.qvalue, np.asarray(array.qvalue)[index])
    np.testing.assert_array_equal(part.scale, np.asarray(array.scale)[index])
    np.testing.assert_array_equal(part.integers(), np.asarray(array.integers())[index])


@widths
@pytest.mark.parametrize("index", [(0, 0, 0, 0), (..., 0), (slice(None),) * 4], ids=str)
def test_the_input_axis_is_never_torn_apart(index: tuple[object, ...], scheme: Scheme) -> None:
    _, array = stack(scheme)
    with pytest.raises(IndexError, match=r"the input axis of a QArray \[2, 3, 5, 576\] cannot be indexed"):
        array[index]


@widths
def test_a_traced_index_slices_in_place(scheme: Scheme) -> None:
    _, array = stack(scheme)
    part = jax.jit(lambda w, i, j: w[i, j])(array, jnp.int32(1), jnp.int32(2))
    assert_same(part, array[1, 2])


def test_wrong_scale_shape_is_named() -> None:
    _, array = stack(Scheme(), (4, 576))
    broken = QArray(qvalue=array.qvalue, scale=array.scale[:, :4], scheme=array.scheme)
    with pytest.raises(WeightsError) as error:
        validate_shapes(broken, name="model.layers.0.mlp.gate_proj.weight")
    assert str(error.value) == (
        "model.layers.0.mlp.gate_proj.weight: scales have shape (4, 4), a weight of shape (4, 576) in groups of 128 "
        "needs (4, 5)"
    )


@pytest.mark.parametrize(
    ("scheme", "values", "scales"),
    [
        (Scheme(), jnp.int32, jnp.float32),
        (Scheme(), jnp.int8, jnp.bfloat16),
        (W4, jnp.int4, jnp.float32),
        (W4, jnp.int8, jnp.float32),
    ],
)
def test_wrong_dtypes_are_named(scheme: Scheme, values: jnp.dtype, scales: jnp.dtype) -> None:
    _, array = stack(scheme, (4, 64))
    values_of, scales_of = (
        jax.ShapeDtypeStruct(a.shape, t) for a, t in ((array.qvalue, values), (array.scale, scales))
    )
    broken = QArray(qvalue=values_of, scale=scales_of, scheme=array.scheme)
    with pytest.raises(WeightsError) as error:
        validate_shapes(broken, name="w")
    stored = (
        f"w: stored as {jnp.dtype(values)} with {jnp.dtype(scales)} scales, expected {scheme.values_dtype} with "
        "float32 scales"
    )
    assert str(error.value) == stored


@widths
def test_abstract_arrays_are_validated_too(scheme: Scheme) -> None:
    weight = jax.ShapeDtypeStruct((4, 576), jnp.float32)
    array = jax.eval_shape(lambda w: quantize_weight(w, scheme), weight)
    validate_shapes(array, name="w")
    assert (array.qvalue.shape, array.scale.shape) == (scheme.values_shape((4, 576)), scheme.scales_shape((4, 576)))


@widths
def test_it_is_a_pytree_of_two_leaves_with_a_static_scheme(scheme: Scheme) -> None:
    _, array = stack(scheme)
    leaves, structure = jax.tree.flatten(array)
    assert [leaf.dtype for leaf in leaves] == [scheme.values_dtype, jnp.float32]
    assert_same(jax.tree.unflatten(structure, leaves), array)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(array)]
    assert paths == [".qvalue", ".scale"]
    other = QArray(qvalue=array.qvalue, scale=array.scale, scheme=Scheme(activation_bits=16))
    assert jax.tree.structure(other) != structure


@widths
def test_it_passes_through_jit_scan_and_vmap(scheme: Scheme) -> None:
    _, array = stack(scheme)
    assert_same(jax.jit(lambda w: w)(array), array)
    _, rows = jax.lax.scan(lambda carry, w: (carry, w.dequantize()), None, array)
    expected = dequantize_jitted(array, jnp.float32)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda w: w.dequantize()))(array), expected)
