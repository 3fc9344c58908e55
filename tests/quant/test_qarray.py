"""QArray: indexing keeps values and scales together, broken invariants are named, and it passes through JAX's tools."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import WeightsError
from jaxmoe.ops.linear.reference import dequantize
from jaxmoe.quant.qarray import QArray, quantize_weight, validate_shapes
from jaxmoe.quant.scheme import Scheme
from tests.tolerances import TOLERANCES

SHAPE = (2, 3, 5, 576)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantize_casts_last(dtype: jnp.dtype) -> None:
    _, array = stack(Scheme())
    restored = dequantize_jitted(array, dtype)
    assert restored.dtype == dtype
    np.testing.assert_array_equal(restored, np.asarray(dequantize_jitted(array, jnp.float32)).astype(dtype))


@pytest.mark.parametrize("index", [0, -1, (1, 2), slice(0, 1), (slice(None), 1), ...], ids=str)
def test_indexing_slices_values_and_scales_alike(index: object) -> None:
    _, array = stack(Scheme())
    part = array[index]
    validate_shapes(part, name="part")
    np.testing.assert_array_equal(part.qvalue, np.asarray(array.qvalue)[index])
    np.testing.assert_array_equal(part.scale, np.asarray(array.scale)[index])


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (..., 0), (slice(None),) * 4], ids=str)
def test_the_input_axis_is_never_torn_apart(index: tuple[object, ...]) -> None:
    _, array = stack(Scheme())
    with pytest.raises(IndexError, match=r"the input axis of a QArray \[2, 3, 5, 576\] cannot be indexed"):
        array[index]


def test_a_traced_index_slices_in_place() -> None:
    _, array = stack(Scheme())
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


@pytest.mark.parametrize(("values", "scales"), [(jnp.int32, jnp.float32), (jnp.int8, jnp.bfloat16)])
def test_wrong_dtypes_are_named(values: jnp.dtype, scales: jnp.dtype) -> None:
    _, array = stack(Scheme(), (4, 64))
    values_of, scales_of = (
        jax.ShapeDtypeStruct(a.shape, t) for a, t in ((array.qvalue, values), (array.scale, scales))
    )
    broken = QArray(qvalue=values_of, scale=scales_of, scheme=array.scheme)
    with pytest.raises(WeightsError) as error:
        validate_shapes(broken, name="w")
    stored = f"w: stored as {jnp.dtype(values)} with {jnp.dtype(scales)} scales, expected int8 with float32 scales"
    assert str(error.value) == stored


def test_abstract_arrays_are_validated_too() -> None:
    weight = jax.ShapeDtypeStruct((4, 576), jnp.float32)
    validate_shapes(jax.eval_shape(lambda w: quantize_weight(w, Scheme()), weight), name="w")


def test_it_is_a_pytree_of_two_leaves_with_a_static_scheme() -> None:
    _, array = stack(Scheme())
    leaves, structure = jax.tree.flatten(array)
    assert [leaf.dtype for leaf in leaves] == [jnp.int8, jnp.float32]
    assert_same(jax.tree.unflatten(structure, leaves), array)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(array)]
    assert paths == [".qvalue", ".scale"]
    other = QArray(qvalue=array.qvalue, scale=array.scale, scheme=Scheme(activation_bits=16))
    assert jax.tree.structure(other) != structure


def test_it_passes_through_jit_scan_and_vmap() -> None:
    _, array = stack(Scheme())
    assert_same(jax.jit(lambda w: w)(array), array)
    _, rows = jax.lax.scan(lambda carry, w: (carry, w.dequantize()), None, array)
    expected = dequantize_jitted(array, jnp.float32)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda w: w.dequantize()))(array), expected)
