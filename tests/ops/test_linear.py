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
from jaxmoe.quant.qarray import QArray, quantize_weight, validate_shapes
from jaxmoe.quant.scheme import Bits, Scheme, parse_scheme
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
W4_SHAPES = [shape for shape in SHAPES if shape[1] % 2 == 0]
W4_SHAPES += [(7, 40, 32), (7, 14, 128), (1, 2, 32), (65, 14, None), (1, 2, None)]
"""4-bit weights have no odd inputs."""
INTEGER_SHAPES = [(8, *shape) for shape in SHAPES] + [(4, *shape) for shape in W4_SHAPES]
"""(weight bits, rows, input width, group)"""
DTYPES = [jnp.float32, jnp.bfloat16]

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])
bits = pytest.mark.parametrize("bits", [8, 4])


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


def random_integers(size: int, scheme: Scheme, lead: tuple[int, ...], seed: int) -> np.ndarray:
    """Over the whole grid."""
    limit = 2 ** (scheme.weight_bits - 1) - 1
    return np.random.default_rng(seed).integers(-limit, limit + 1, size=(*lead, OUT, size)).astype(np.int8)


def stored(values: np.ndarray, scale: np.ndarray, scheme: Scheme) -> QArray:
    """Of numpy arrays, so that nothing compiles but the operator."""
    group = scheme.group_size(values.shape[-1])
    qvalue = values if scheme.weight_bits == 8 else reference.pack_pairs(values, group)
    array = QArray(qvalue=qvalue, scale=scale.astype(np.float32), scheme=scheme)
    validate_shapes(array, name="w")
    return array


def integers(w: QArray) -> np.ndarray:
    """The weight's integers, by the oracle."""
    return w.qvalue if w.scheme.weight_bits == 8 else reference.unpack_pairs(w.qvalue, w.group)


def random_stack(size: int, scheme: Scheme, lead: tuple[int, ...] = (LAYERS,)) -> QArray:
    """Values over the whole grid and scales that differ."""
    scale = np.random.default_rng(1).uniform(0.5, 1.5, size=scheme.scales_shape((*lead, OUT, size)))
    return stored(random_integers(size, scheme, lead, 5), scale, scheme)


def exact_input(rows: int, size: int) -> np.ndarray:
    """Integers with 127 in every row: the scale of each token is 1 and quantisation changes nothing."""
    x = np.random.default_rng(2).integers(-127, 128, size=(rows, size)).astype(np.float32)
    x[np.arange(rows), np.arange(rows) % size] = 127
    return x


def exact_weight(size: int, scheme: Scheme, lead: tuple[int, ...] = (LAYERS,)) -> QArray:
    """Integers with power-of-two scales: every float32 operation on the exact sums is exact."""
    scale = 2.0 ** np.random.default_rng(3).integers(-2, 2, size=scheme.scales_shape((*lead, OUT, size)))
    return stored(random_integers(size, scheme, lead, 6), scale, scheme)


def exact_product(x: np.ndarray, w: QArray) -> np.ndarray:
    """x @ w.T in float64, checked to be exact in float32."""
    weight = reference.dequantize(integers(w), w.scale, w.group).astype(np.float64)
    assert (4 * np.abs(x.astype(np.float64)) @ np.abs(weight).T).max() < 2**27, "keep the sums small"
    product = x.astype(np.float64) @ weight.T
    assert (product == product.astype(np.float32)).all(), "the example is not exact"
    return product.astype(np.float32)


def oracle(x: np.ndarray, w: QArray) -> np.ndarray:
    return reference.w8a8(x, integers(w), w.scale, w.group)


def assert_close(out: np.ndarray, expected: np.ndarray, bound: np.ndarray | float) -> None:
    """In float32 up to `bound`; a bfloat16 result may also be one ulp off."""
    slack = 0.0 if out.dtype == np.float32 else TOLERANCES["bfloat16_ulp"].value * np.abs(expected)
    assert out.shape == expected.shape
    assert (np.abs(out.astype(np.float32) - expected) <= bound + slack).all()


@impls
@pytest.mark.parametrize(
    ("bits", "rows", "size", "group", "dtype"),
    [(*shape, jnp.float32) for shape in INTEGER_SHAPES]
    + [(8, 1, 576, 128, jnp.bfloat16), (8, 65, 13, None, jnp.bfloat16), (4, 65, 40, 32, jnp.bfloat16)]
    + [(4, 7, 576, None, jnp.bfloat16)],
)
def test_int8_activations_are_the_oracle(
    bits: Bits, rows: int, size: int, group: int | None, dtype: jnp.dtype, impl: str
) -> None:
    x, w = random_input(rows, size).astype(dtype), random_stack(size, Scheme(weight_bits=bits, group=group))
    out = apply(x, w, impl, layer=1)
    assert out.dtype == dtype
    expected = oracle(x.astype(np.float32), w[1])
    assert_close(out, expected, TOLERANCES["int8_linear"].value * np.abs(expected).max())


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    ("bits", "rows", "size", "group"),
    [
        *((8, *shape) for shape in [(1, 576, 128), (65, 576, 128), (7, 13, None), (7, 64, 32)]),
        *((4, *shape) for shape in [(1, 576, 128), (65, 576, 256), (7, 40, 32), (7, 14, 128), (7, 576, None)]),
    ],
)
def test_weight_only_is_a_float_product(
    bits: Bits, rows: int, size: int, group: int | None, dtype: jnp.dtype, impl: str
) -> None:
    x = random_input(rows, size).astype(dtype)
    w = random_stack(size, Scheme(weight_bits=bits, activation_bits=16, group=group))
    out = apply(x, w, impl, layer=2)
    assert out.dtype == dtype
    wide = x.astype(np.float64)
    weight = reference.dequantize(integers(w)[2], w.scale[2], w.group).astype(np.float64)
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
@pytest.mark.parametrize(("bits", "rows", "size", "group"), INTEGER_SHAPES)
def test_integer_sums_are_exact(bits: Bits, rows: int, size: int, group: int | None, impl: str) -> None:
    x, w = exact_input(rows, size), exact_weight(size, Scheme(weight_bits=bits, group=group))
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
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("group", [128, 256, None])
def test_the_largest_sum_of_4_bit_weights_is_exact(group: int | None, sign: int, impl: str) -> None:
    x = np.full((2, 576), 127, np.float32)
    scheme = Scheme(weight_bits=4, group=group)
    w = stored(np.full((OUT, 576), sign * 7, np.int8), np.ones((OUT, scheme.num_groups(576))), scheme)
    assert (apply(x, w, impl) == sign * 576 * 127 * 7).all()


@impls
@bits
def test_single_weight_bias_and_stack_agree(bits: Bits, impl: str) -> None:
    x, w = exact_input(7, 576), exact_weight(576, Scheme(weight_bits=bits))
    bias = np.random.default_rng(4).integers(-100, 100, size=(LAYERS, OUT)).astype(np.float32)
    for layer in range(LAYERS):
        expected = exact_product(x, w[layer])
        np.testing.assert_array_equal(apply(x, w[layer], impl), expected)
        np.testing.assert_array_equal(apply(x, w, impl, layer=layer), expected)
        np.testing.assert_array_equal(apply(x, w[layer], impl, bias=bias[layer]), expected + bias[layer])
        np.testing.assert_array_equal(apply(x, w, impl, layer=layer, bias=bias), expected + bias[layer])


@impls
@pytest.mark.parametrize(
    ("bits", "size", "group"), [(8, 576, 128), (8, 13, 128), (4, 576, 128), (4, 14, 128), (4, 576, None)]
)
def test_case_15_a_row_does_not_depend_on_its_batch(bits: Bits, size: int, group: int | None, impl: str) -> None:
    x, w = random_input(65, size), random_stack(size, Scheme(weight_bits=bits, group=group), lead=())
    alone = apply(x[:1], w, impl)
    for rows in (2, 7, 8, 9, 64, 65):
        for place in {0, rows // 2, rows - 1}:
            batch = np.roll(x[:rows], place, axis=0)
            np.testing.assert_array_equal(apply(batch, w, impl)[place], alone[0])


@impls
@bits
def test_a_nan_row_damages_only_itself(bits: Bits, impl: str) -> None:
    x, w = random_input(7, 576), random_stack(576, Scheme(weight_bits=bits), lead=())
    clean = apply(x, w, impl)
    x[3, 100] = np.nan
    out = apply(x, w, impl)
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), np.delete(clean, 3, axis=0))


@impls
@bits
def test_zero_rows_give_zeros(bits: Bits, impl: str) -> None:
    w = random_stack(576, Scheme(weight_bits=bits), lead=())
    assert (apply(np.zeros((2, 576), np.float32), w, impl) == 0).all()


@impls
@pytest.mark.parametrize("scheme", ["w8a8-g128", "w4a8-g128", "w4a8-channel"])
def test_a_layer_is_read_in_place(scheme: str, impl: str) -> None:
    """No copy of the stack, widened or not, however many layers there are."""
    x, parsed = jax.ShapeDtypeStruct((8, 1024), jnp.float32), parse_scheme(scheme)

    def temporary_bytes(layers: int) -> int:
        w = jax.eval_shape(partial(quantize_weight, scheme=parsed), jax.ShapeDtypeStruct((layers, 512, 1024), x.dtype))

        def scan(x: jax.Array, w: QArray) -> jax.Array:
            return jax.lax.fori_loop(0, layers, lambda i, acc: acc + linear(x, w, layer=i, impl=impl), x[:, :512])

        return jax.jit(scan).lower(x, w).compile().memory_analysis().temp_size_in_bytes

    # Scalar indices aside, more layers need nothing more.
    assert temporary_bytes(64) <= temporary_bytes(4) + 4096


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
