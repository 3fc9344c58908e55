"""The jaxpr lint finds integer products that wrap, wherever they hide, and proves that the INT8 path is INT8."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxmoe.errors import EngineError
from jaxmoe.ops.experts import experts
from jaxmoe.ops.linear import linear
from jaxmoe.ops.lint import check_integer_dots, operand_dtypes, products
from jaxmoe.quant.qarray import QArray, quantize_weight
from jaxmoe.quant.scheme import parse_scheme

BYTES = jax.ShapeDtypeStruct((4, 4), jnp.int8)
SQUARE = (((1,), (0,)), ((), ()))

Product = Callable[[jax.Array, jax.Array], jax.Array]


def good(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, SQUARE, preferred_element_type=jnp.int32)


def wraps(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b).astype(jnp.int32)


def in_jit(f: Product, a: jax.Array) -> jax.Array:
    return jax.jit(f)(a, a)


def in_scan(f: Product, a: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, row: (carry + f(a, row), None), f(a, a), jnp.stack([a, a]))[0]


def in_while(f: Product, a: jax.Array) -> jax.Array:
    return lax.while_loop(lambda carry: carry[0, 0] < 9, lambda carry: carry + f(a, a), jnp.zeros((4, 4), jnp.int32))


def in_while_condition(f: Product, a: jax.Array) -> jax.Array:
    return lax.while_loop(lambda carry: f(carry, a)[0, 0] < 9, lambda carry: carry, a)


def in_one_branch(f: Product, a: jax.Array) -> jax.Array:
    return lax.cond(a[0, 0] > 0, lambda: jnp.zeros((4, 4), jnp.int32), lambda: f(a, a))


def in_shard_map(f: Product, a: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("shard")
    return jax.shard_map(lambda x: f(x, jnp.ones((4, 4), jnp.int8)), mesh=mesh, in_specs=spec, out_specs=spec)(a)


def in_custom_jvp(f: Product, a: jax.Array) -> jax.Array:
    function = jax.custom_jvp(f)
    function.defjvp(lambda primals, tangents: (f(*primals), f(*primals)))
    return function(a, a)


def in_custom_vjp(f: Product, a: jax.Array) -> jax.Array:
    function = jax.custom_vjp(f)
    function.defvjp(lambda x, y: (f(x, y), None), lambda residuals, cotangent: (None, None))
    return function(a, a)


def in_checkpoint(f: Product, a: jax.Array) -> jax.Array:
    return jax.checkpoint(f)(a, a)


def in_vmap(f: Product, a: jax.Array) -> jax.Array:
    return jax.vmap(f)(jnp.stack([a, a]), jnp.stack([a, a]))


NESTS = [
    in_jit,
    in_scan,
    in_while,
    in_while_condition,
    in_one_branch,
    in_shard_map,
    in_custom_jvp,
    in_custom_vjp,
    in_checkpoint,
    in_vmap,
]
nests = pytest.mark.parametrize("nest", NESTS, ids=lambda nest: nest.__name__)


def test_case_128_the_product_that_the_lint_forbids_is_wrong() -> None:
    hundred = jnp.full((1, 1), 100, jnp.int8)
    assert jnp.matmul(hundred, hundred).tolist() == [[16]]
    assert good(hundred, hundred).tolist() == [[10000]]


def test_case_10_a_product_that_wraps_is_an_error_that_names_it() -> None:
    with pytest.raises(EngineError) as error:
        check_integer_dots(jax.make_jaxpr(wraps)(BYTES, BYTES))
    message = str(error.value)
    assert "dot_general of int8 and int8 with int8 result" in message
    assert "i8[4,4] = dot_general[" in message
    assert "preferred_element_type=int32" in message


@nests
def test_products_are_counted_wherever_they_are(nest: Callable[..., jax.Array]) -> None:
    closed = jax.jit(partial(nest, good)).trace(BYTES).jaxpr
    assert check_integer_dots(closed) == (2 if nest is in_scan else 1)


@nests
def test_products_that_wrap_are_found_wherever_they_are(nest: Callable[..., jax.Array]) -> None:
    closed = jax.jit(partial(nest, wraps)).trace(BYTES).jaxpr
    with pytest.raises(EngineError, match="integer product wraps"):
        check_integer_dots(closed)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int4, jnp.int16])
def test_other_narrow_integers_wrap_too(dtype: jnp.dtype) -> None:
    narrow = jax.ShapeDtypeStruct((4, 4), dtype)
    with pytest.raises(EngineError, match="integer product wraps"):
        check_integer_dots(jax.make_jaxpr(jnp.matmul)(narrow, narrow))


def test_an_integer_product_with_a_float_result_is_an_error() -> None:
    closed = jax.make_jaxpr(lambda a: lax.dot_general(a, a, SQUARE, preferred_element_type=jnp.float32))(BYTES)
    with pytest.raises(EngineError, match="float32 result"):
        check_integer_dots(closed)


def test_widened_operands_are_an_error() -> None:
    def widened(a: jax.Array) -> jax.Array:
        return jnp.matmul(a.astype(jnp.int32), a.astype(jnp.int32))

    with pytest.raises(EngineError, match="widened operands"):
        check_integer_dots(jax.make_jaxpr(widened)(BYTES))


def test_float_products_are_not_counted() -> None:
    wide = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert check_integer_dots(jax.make_jaxpr(jnp.matmul)(wide, wide)) == 0


def abstract_weight(*shape: int, scheme: str) -> QArray:
    return jax.eval_shape(lambda w: quantize_weight(w, parse_scheme(scheme)), jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize(("scheme", "count"), [("w8a8-g32", 3), ("w4a8-g32", 3), ("w8a16-g32", 0), ("w4a16-g32", 0)])
@pytest.mark.parametrize("rows", [1, 8])
def test_linear_multiplies_integers_where_it_should(scheme: str, count: int, rows: int) -> None:
    x = jax.ShapeDtypeStruct((rows, 96), jnp.bfloat16)
    traced = jax.jit(lambda x, w, layer: linear(x, w, layer=layer, impl="xla")).trace(
        x, abstract_weight(2, 24, 96, scheme=scheme), jax.ShapeDtypeStruct((), jnp.int32)
    )
    assert check_integer_dots(traced.jaxpr) == count


@pytest.mark.parametrize("scheme", ["w8a8-g32", "w4a8-g32", "w8a16-g32", "w4a16-g32"])
def test_experts_multiply_integers_where_they_should(scheme: str) -> None:
    gate, down = abstract_weight(2, 4, 32, 64, scheme=scheme), abstract_weight(2, 4, 64, 32, scheme=scheme)
    traced = jax.jit(partial(experts, total_experts=4, impl="xla")).trace(
        jax.ShapeDtypeStruct((8, 64), jnp.float32),
        jax.ShapeDtypeStruct((8, 2), jnp.int32),
        jax.ShapeDtypeStruct((8, 2), jnp.float32),
        gate,
        gate,
        down,
        layer=np.int32(1),
    )
    count = check_integer_dots(traced.jaxpr)
    assert (
        count >= 5 if parse_scheme(scheme).activation_bits == 8 else count == 0
    )  # two groups of gate, two of up, one of down


@pytest.mark.parametrize("scheme", ["w8a8-g32", "w4a8-g32"])
def test_the_integer_path_has_no_product_but_of_int8(scheme: str) -> None:
    """No float product at all, hence none of INT8 values that were converted."""
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    ids, weights = jax.ShapeDtypeStruct((8, 2), jnp.int32), jax.ShapeDtypeStruct((8, 2), jnp.float32)
    gate, down = abstract_weight(2, 4, 32, 64, scheme=scheme), abstract_weight(2, 4, 64, 32, scheme=scheme)

    def layer(x: jax.Array, w: QArray, ids: jax.Array, weights: jax.Array, gate: QArray, down: QArray) -> jax.Array:
        out = linear(x, w, layer=1, impl="xla")
        return experts(out, ids, weights, gate, gate, down, layer=1, total_experts=4, impl="xla")

    traced = jax.jit(layer).trace(x, abstract_weight(2, 64, 64, scheme=scheme), ids, weights, gate, down)
    found = list(products(traced.jaxpr))
    assert {operand_dtypes(equation) for _, equation in found} == {(jnp.dtype(jnp.int8), jnp.dtype(jnp.int8))}
    assert len(found) == check_integer_dots(traced.jaxpr)
    assert {where for where, _ in found} == {"top level", "while"}
