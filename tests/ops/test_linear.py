"""Contract of linear, for every implementation: oracles, exact integer sums, rows that ignore their neighbours."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import UnsupportedError
from jaxmoe.ops import linear as op
from jaxmoe.ops.dispatch import choose
from jaxmoe.ops.linear import linear, reference
from jaxmoe.quant.qarray import QArray
from jaxmoe.quant.scheme import Scheme
from tests.tolerances import TOLERANCES

OUT, LAYERS = 24, 3
ROWS = (1, 2, 7, 8, 64, 65)
WIDTHS: dict[int, tuple[int | None, ...]] = {
    576: (32, 64, 128, 256, None),
    128: (32, 64),
    64: (32, 128),
    13: (128, None),
}
"""Groups for each input width: several, ragged, one, and wider than the input."""
# All row counts at one width, all widths and groups at one row count.
SHAPES = [(rows, 576, 128) for rows in ROWS if rows != 7]
SHAPES += [(7, size, group) for size, groups in WIDTHS.items() for group in groups]
DTYPES = [jnp.float32, jnp.bfloat16]

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])


@partial(jax.jit, static_argnames="impl")
def run(x: jax.Array, w: jax.Array | QArray, layer: jax.Array | None, bias: jax.Array | None, impl: str) -> jax.Array:
    return linear(x, w, layer=layer, bias=bias, impl=impl)


def apply(
    x: np.ndarray | jax.Array,
    w: jax.Array | QArray,
    impl: str,
    *,
    layer: int | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """The jitted operator with a traced layer index; skips what the implementation refuses."""
    index = None if layer is None else np.int32(layer)
    try:
        choose("linear", op.IMPLS, impl, x, w, layer=index, bias=bias)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return np.asarray(run(x, w, index, bias, impl))


def random_input(rows: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, size)).astype(np.float32)


def random_stack(size: int, scheme: Scheme, lead: tuple[int, ...] = (LAYERS,)) -> QArray:
    """Values over the whole grid and scales that differ; of numpy arrays, so that nothing compiles but the operator."""
    generator = np.random.default_rng(1)
    values = generator.integers(-127, 128, size=(*lead, OUT, size)).astype(np.int8)
    scale = generator.uniform(0.5, 1.5, size=(*lead, OUT, scheme.num_groups(size))).astype(np.float32)
    return QArray(qvalue=values, scale=scale, scheme=scheme)


def exact_input(rows: int, size: int) -> np.ndarray:
    """Integers with 127 in every row: the scale of each token is 1 and quantisation changes nothing."""
    x = np.random.default_rng(2).integers(-127, 128, size=(rows, size)).astype(np.float32)
    x[np.arange(rows), np.arange(rows) % size] = 127
    return x


def exact_weight(size: int, scheme: Scheme, lead: tuple[int, ...] = (LAYERS,)) -> QArray:
    """Integers with power-of-two scales: every float32 operation on the exact sums is exact."""
    generator = np.random.default_rng(3)
    values = generator.integers(-127, 128, size=(*lead, OUT, size)).astype(np.int8)
    scale = 2.0 ** generator.integers(-2, 2, size=(*lead, OUT, scheme.num_groups(size)))
    return QArray(qvalue=values, scale=scale.astype(np.float32), scheme=scheme)


def exact_product(x: np.ndarray, w: QArray) -> np.ndarray:
    """x @ w.T in float64, checked to be exact in float32."""
    weight = reference.dequantize(w.qvalue, w.scale, w.group).astype(np.float64)
    assert (4 * np.abs(x.astype(np.float64)) @ np.abs(weight).T).max() < 2**27, "keep the sums small"
    product = x.astype(np.float64) @ weight.T
    assert (product == product.astype(np.float32)).all(), "the example is not exact"
    return product.astype(np.float32)


def oracle(x: np.ndarray, w: QArray) -> np.ndarray:
    return reference.w8a8(x, w.qvalue, w.scale, w.group)


def assert_close(out: np.ndarray, expected: np.ndarray, bound: np.ndarray | float) -> None:
    """In float32 up to `bound`; a bfloat16 result may also be one ulp off."""
    slack = 0.0 if out.dtype == np.float32 else TOLERANCES["bfloat16_ulp"].value * np.abs(expected)
    assert out.shape == expected.shape
    assert (np.abs(out.astype(np.float32) - expected) <= bound + slack).all()


@impls
@pytest.mark.parametrize(
    ("rows", "size", "group", "dtype"),
    [(*shape, jnp.float32) for shape in SHAPES] + [(1, 576, 128, jnp.bfloat16), (65, 13, None, jnp.bfloat16)],
)
def test_w8a8_is_the_oracle(rows: int, size: int, group: int | None, dtype: jnp.dtype, impl: str) -> None:
    x, w = random_input(rows, size).astype(dtype), random_stack(size, Scheme(group=group))
    out = apply(x, w, impl, layer=1)
    assert out.dtype == dtype
    expected = oracle(x.astype(np.float32), w[1])
    assert_close(out, expected, TOLERANCES["int8_linear"].value * np.abs(expected).max())


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(("rows", "size", "group"), [(1, 576, 128), (65, 576, 128), (7, 13, None), (7, 64, 32)])
def test_w8a16_is_a_float_product(rows: int, size: int, group: int | None, dtype: jnp.dtype, impl: str) -> None:
    x = random_input(rows, size).astype(dtype)
    w = random_stack(size, Scheme(activation_bits=16, group=group))
    out = apply(x, w, impl, layer=2)
    assert out.dtype == dtype
    wide = x.astype(np.float64)
    weight = reference.dequantize(w.qvalue[2], w.scale[2], w.group).astype(np.float64)
    assert_close(out, wide @ weight.T, TOLERANCES["float_linear"].value * (np.abs(wide) @ np.abs(weight).T))


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("rows", [1, 7])
def test_float_weight(rows: int, dtype: jnp.dtype, impl: str) -> None:
    x = random_input(rows, 576).astype(dtype)
    w = random_input(LAYERS * OUT, 576, seed=1).reshape(LAYERS, OUT, 576).astype(dtype)
    wide, weight = (a.astype(np.float64) for a in (x, w[0]))
    bound = TOLERANCES["float_linear"].value * (np.abs(wide) @ np.abs(weight).T)
    assert_close(apply(x, w, impl, layer=0), wide @ weight.T, bound)


@impls
@pytest.mark.parametrize(("rows", "size", "group"), SHAPES)
def test_integer_sums_are_exact(rows: int, size: int, group: int | None, impl: str) -> None:
    x, w = exact_input(rows, size), exact_weight(size, Scheme(group=group))
    np.testing.assert_array_equal(apply(x, w, impl, layer=2), exact_product(x, w[2]))


@impls
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sum_of_a_group_of_128_is_exact(sign: int, impl: str) -> None:
    x = np.full((2, 576), 127, np.float32)
    scheme = Scheme()
    ones = np.ones((OUT, scheme.num_groups(576)), np.float32)
    w = QArray(qvalue=np.full((OUT, 576), sign * 127, np.int8), scale=ones, scheme=scheme)
    assert (apply(x, w, impl) == sign * 576 * 127**2).all()


@impls
def test_single_weight_bias_and_stack_agree(impl: str) -> None:
    x, w = exact_input(7, 576), exact_weight(576, Scheme())
    bias = np.random.default_rng(4).integers(-100, 100, size=(LAYERS, OUT)).astype(np.float32)
    for layer in range(LAYERS):
        expected = exact_product(x, w[layer])
        np.testing.assert_array_equal(apply(x, w[layer], impl), expected)
        np.testing.assert_array_equal(apply(x, w, impl, layer=layer), expected)
        np.testing.assert_array_equal(apply(x, w[layer], impl, bias=bias[layer]), expected + bias[layer])
        np.testing.assert_array_equal(apply(x, w, impl, layer=layer, bias=bias), expected + bias[layer])


@impls
@pytest.mark.parametrize("size", [576, 13])
def test_case_15_a_row_does_not_depend_on_its_batch(size: int, impl: str) -> None:
    x, w = random_input(65, size), random_stack(size, Scheme(), lead=())
    alone = apply(x[:1], w, impl)
    for rows in (2, 7, 8, 9, 64, 65):
        for place in {0, rows // 2, rows - 1}:
            batch = np.roll(x[:rows], place, axis=0)
            np.testing.assert_array_equal(apply(batch, w, impl)[place], alone[0])


@impls
def test_a_nan_row_damages_only_itself(impl: str) -> None:
    x, w = random_input(7, 576), random_stack(576, Scheme(), lead=())
    clean = apply(x, w, impl)
    x[3, 100] = np.nan
    out = apply(x, w, impl)
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), np.delete(clean, 3, axis=0))


@impls
def test_zero_rows_give_zeros(impl: str) -> None:
    assert (apply(np.zeros((2, 576), np.float32), random_stack(576, Scheme(), lead=()), impl) == 0).all()


def test_operands_that_do_not_fit_are_named() -> None:
    x, w = jnp.ones((7, 64)), random_stack(128, Scheme())
    with pytest.raises(ValueError) as error:
        linear(x, w, layer=0)
    expected = "linear: x float32[7, 64] does not fit w QArray int8[3, 24, 128] (with a layer index)"
    assert str(error.value) == expected
    with pytest.raises(ValueError, match=r"w Array float32\[3, 24, 64\] \(no layer index\)"):
        linear(x, jnp.ones((3, 24, 64)))
    with pytest.raises(ValueError, match=r"with a layer index"):
        linear(x, jnp.ones((24, 64)), layer=0)


def test_a_bias_of_another_shape_is_refused() -> None:
    x = jnp.ones((7, 64))
    with pytest.raises(ValueError, match=r"bias \[3, 24\] does not fit w \[24, 64\]"):
        linear(x, jnp.ones((24, 64)), bias=jnp.ones((3, 24)))
    with pytest.raises(ValueError, match=r"bias \[2, 24\] does not fit w \[3, 24, 64\]"):
        linear(x, jnp.ones((3, 24, 64)), layer=0, bias=jnp.ones((2, 24)))


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="linear has no implementation 'cuda'; it has "):
        linear(jnp.ones((7, 64)), jnp.ones((24, 64)), impl="cuda")
