"""Contract of experts, for every implementation: any routing, exact sums, no row or expert that leaks into another."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.ops import experts as op
from jaxmoe.ops.dispatch import choose
from jaxmoe.ops.experts import SWIGLU, Activation, experts, reference
from jaxmoe.ops.linear import reference as linear_reference
from jaxmoe.quant.qarray import QArray, Weight, quantize_weight, validate_shapes
from jaxmoe.quant.scheme import Bits, Scheme, parse_scheme
from tests.tolerances import TOLERANCES

EMBED, FFN, EXPERTS, LAYERS, LAYER = 72, 40, 6, 2, 1
"""Neither width is a multiple of the group, so that last groups are short."""
GROUP = 32

Stacks = tuple[Weight, Weight, Weight]
Biases = tuple[np.ndarray, np.ndarray, np.ndarray]

bits_of_weights = pytest.mark.parametrize("bits", [8, 4])
impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])


@partial(jax.jit, static_argnames=("total_experts", "activation", "impl"))
def run(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    stacks: Stacks,
    layer: jax.Array,
    total_experts: int,
    impl: str,
    activation: Activation = SWIGLU,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    options = {"layer": layer, "total_experts": total_experts, "activation": activation, "biases": biases}
    return experts(x, ids, weights, *stacks, **options, impl=impl)


def apply(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    stacks: Stacks,
    impl: str,
    *,
    total_experts: int = EXPERTS,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
) -> np.ndarray:
    """The jitted operator with a traced layer index; skips what the implementation refuses."""
    arguments, layer = (x, ids, weights, *stacks), np.int32(LAYER)
    options = {"total_experts": total_experts, "activation": activation, "biases": biases}
    try:
        choose("experts", op.IMPLS, impl, *arguments, layer=layer, **options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return np.asarray(run(x, ids, weights, stacks, layer, impl=impl, **options))


def route(tokens: int, top_k: int, num_experts: int = EXPERTS, seed: int = 0) -> np.ndarray:
    """Distinct random ids for each token."""
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(num_experts)[:top_k] for _ in range(tokens)]).astype(np.int32)


def route_outside(tokens: int) -> np.ndarray:
    """Ids of which some are elsewhere: -1, the first beyond the end and far beyond it; one token has none here."""
    ids = route(tokens, 3)
    ids[::2, 0], ids[1::3, 1], ids[::5, 2] = -1, EXPERTS, 2**30
    ids[tokens // 2] = [-1, EXPERTS, EXPERTS + 7]
    return ids


def fill(ids: np.ndarray) -> np.ndarray:
    """One shape for most routings, so that they share a program: more tokens in turn, more slots that are elsewhere."""
    full = np.tile(np.int32([-1, EXPERTS, -2]), (17, 1))
    full[:, : ids.shape[1]] = np.resize(ids, (17, ids.shape[1]))
    return full


ROUTINGS: dict[str, np.ndarray] = {
    "random": route(17, 3),
    "one token": route(1, 2),
    "all to one": fill(np.int32([[4]])),
    "empty experts": fill(np.where(route(17, 2, 2) == 0, 1, 5)),
    "some elsewhere": route_outside(17),
    "none here": fill(np.zeros((17, 0), np.int32)),
    "all experts": route(8, EXPERTS),
}


def combine_weights(ids: np.ndarray) -> np.ndarray:
    """Powers of two, so that they round nothing."""
    return (0.5 ** np.random.default_rng(1).integers(0, 2, size=ids.shape)).astype(np.float32)


def stored(values: np.ndarray, scale: np.ndarray, scheme: Scheme) -> QArray:
    """Of numpy arrays, so that nothing compiles but the operator."""
    group = scheme.group_size(values.shape[-1])
    qvalue = values if scheme.weight_bits == 8 else linear_reference.pack_pairs(values, group)
    array = QArray(qvalue=qvalue, scale=scale.astype(np.float32), scheme=scheme)
    validate_shapes(array, name="w")
    return array


def integers(w: QArray) -> np.ndarray:
    """The weight's integers, by the oracle."""
    return w.qvalue if w.scheme.weight_bits == 8 else linear_reference.unpack_pairs(w.qvalue, w.group)


def exact_example(
    tokens: int, num_experts: int = EXPERTS, bits: Bits = 8, group: int | None = GROUP
) -> tuple[np.ndarray, tuple[QArray, QArray, QArray]]:
    """Operands on which every step is exact in float32.

    Each row of x holds 64 first and 127 second. gate picks the 64 (times a power of two), where silu(g) == g; up picks
    one feature with a sign, the 127 among them; so the largest hidden value is 127 * 2**n and its grid is exact too.
    """
    generator = np.random.default_rng(2)
    x = generator.integers(-127, 128, size=(tokens, EMBED)).astype(np.float32)
    x[:, 0], x[:, 1] = 64, 127
    lead, limit = (LAYERS, num_experts), 2 ** (bits - 1) - 1
    gate = np.zeros((*lead, FFN, EMBED), np.int8)
    gate[..., 0] = 1
    up = np.zeros((*lead, FFN, EMBED), np.int8)
    chosen = generator.integers(1, EMBED, size=(*lead, FFN, 1))
    chosen[..., 0, :] = 1
    np.put_along_axis(up, chosen, generator.choice(np.int8([-1, 1]), size=chosen.shape), axis=-1)
    down = generator.integers(-limit, limit + 1, size=(*lead, EMBED, FFN)).astype(np.int8)
    scheme = Scheme(weight_bits=bits, group=group)

    def quantized(values: np.ndarray, scale: np.ndarray) -> QArray:
        return stored(values, np.broadcast_to(scale, scheme.scales_shape(values.shape)).copy(), scheme)

    gate_scale = 2.0 ** generator.integers(0, 3, size=(*lead, 1, 1))
    down_scale = 2.0 ** generator.integers(-2, 1, size=(*lead, EMBED, scheme.num_groups(FFN)))
    return x, (quantized(gate, gate_scale), quantized(up, np.float32(1)), quantized(down, down_scale))


def exact_result(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, stacks: tuple[QArray, QArray, QArray]
) -> np.ndarray:
    """The sum over the slots in float64, with silu left out: not the oracle, but what the oracle must give too."""
    gate, up, down = (
        linear_reference.dequantize(integers(w)[LAYER], w.scale[LAYER], w.group).astype(np.float64) for w in stacks
    )
    total = np.zeros(x.shape, np.float64)
    for token, slot in np.ndindex(ids.shape):
        expert = ids[token, slot]
        if 0 <= expert < len(gate):
            row = x[token].astype(np.float64)
            total[token] += weights[token, slot] * (down[expert] @ ((gate[expert] @ row) * (up[expert] @ row)))
    assert (total == total.astype(np.float32)).all(), "the example is not exact"
    return total.astype(np.float32)


def random_example(tokens: int, scheme: Scheme | None) -> tuple[np.ndarray, Stacks]:
    """Random operands of ordinary size; float32 weights when there is no scheme."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(tokens, EMBED)).astype(np.float32)

    def weight(out: int, size: int) -> Weight:
        shape = (LAYERS, EXPERTS, out, size)
        if scheme is None:
            return (generator.normal(size=shape) / size**0.5).astype(np.float32)
        limit = 2 ** (scheme.weight_bits - 1) - 1
        values = generator.integers(-limit, limit + 1, size=shape).astype(np.int8)
        scale = generator.uniform(0.5, 1.5, size=scheme.scales_shape(shape)) / (limit / 2 * size**0.5)
        return stored(values, scale, scheme)

    return x, (weight(FFN, EMBED), weight(FFN, EMBED), weight(EMBED, FFN))


def projector(stacks: Stacks) -> Callable[[str, int, np.ndarray], np.ndarray]:
    """What the oracle multiplies with."""
    names = dict(zip(("gate", "up", "down"), stacks, strict=True))

    def project(name: str, expert: int, rows: np.ndarray) -> np.ndarray:
        w = names[name]
        if not isinstance(w, QArray):
            return rows @ w[LAYER, expert].T
        values, scale = integers(w[LAYER, expert]), w.scale[LAYER, expert]
        if w.scheme.activation_bits == 8:
            return linear_reference.w8a8(rows, values, scale, w.group)
        return rows @ linear_reference.dequantize(values, scale, w.group).T

    return project


@impls
@pytest.mark.parametrize(("bits", "group"), [(8, GROUP), (4, GROUP), (4, None)])
@pytest.mark.parametrize(
    ("routing", "dtype"), [*((routing, jnp.float32) for routing in ROUTINGS), ("some elsewhere", jnp.bfloat16)]
)
def test_every_routing_is_exact(routing: str, dtype: jnp.dtype, bits: Bits, group: int | None, impl: str) -> None:
    ids = ROUTINGS[routing]
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids), bits=bits, group=group)
    out = apply(x.astype(dtype), ids, weights, stacks, impl)
    assert out.dtype == np.float32
    expected = exact_result(x, ids, weights, stacks)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(reference.experts(x, ids, weights, projector(stacks), EXPERTS), expected)
    if routing == "none here":
        assert (out == 0).all()


@impls
def test_one_expert(impl: str) -> None:
    x, stacks = exact_example(7, num_experts=1)
    ids = np.int32([[0], [-1], [0], [1], [0], [0], [0]])
    out = apply(x, ids, combine_weights(ids), stacks, impl, total_experts=1)
    np.testing.assert_array_equal(out, exact_result(x, ids, combine_weights(ids), stacks))
    assert (out[[1, 3]] == 0).all()


@impls
@pytest.mark.parametrize("total_experts", [1, 64])
def test_tiles_larger_and_smaller_than_the_counts(total_experts: int, impl: str) -> None:
    ids = route_outside(17)
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids))
    out = apply(x, ids, weights, stacks, impl, total_experts=total_experts)
    np.testing.assert_array_equal(out, exact_result(x, ids, weights, stacks))


@impls
@pytest.mark.parametrize(
    ("scheme", "tolerance"),
    [
        (Scheme(group=32), "int8_experts"),
        (Scheme(group=None), "int8_experts"),
        (Scheme(group=32, weight_bits=4), "int8_experts"),
        (Scheme(group=64, weight_bits=4), "int8_experts"),
        (Scheme(group=None, weight_bits=4), "int8_experts"),
        (Scheme(group=32, activation_bits=16), "float_experts"),
        (Scheme(group=32, weight_bits=4, activation_bits=16), "float_experts"),
        (Scheme(group=None, weight_bits=4, activation_bits=16), "float_experts"),
        (None, "float_experts"),
    ],
    ids=lambda value: getattr(value, "name", value) or "float32",
)
def test_random_operands_are_the_oracle(scheme: Scheme | None, tolerance: str, impl: str) -> None:
    ids = route_outside(17)
    weights = np.random.default_rng(4).uniform(size=ids.shape).astype(np.float32)
    x, stacks = random_example(len(ids), scheme)
    expected = reference.experts(x, ids, weights, projector(stacks), EXPERTS)
    bound = TOLERANCES[tolerance].value * np.abs(expected).max()
    np.testing.assert_allclose(apply(x, ids, weights, stacks, impl), expected, rtol=0, atol=bound)


@impls
@pytest.mark.parametrize("bits", [(8, 16), (16, 8)], ids=str)
def test_gate_and_up_keep_their_own_schemes(bits: tuple[int, int], impl: str) -> None:
    """A weight-only projection beside an INT8 one stays weight-only: the oracle told apart by more than its bound."""
    ids = route(17, 3)
    weights = combine_weights(ids)
    x, (gate, up, down) = random_example(len(ids), Scheme(group=32))
    pairs = zip((gate, up), bits, strict=True)
    mixed = tuple(replace(w, scheme=replace(w.scheme, activation_bits=count)) for w, count in pairs)
    only = replace(down, scheme=replace(down.scheme, activation_bits=16))
    out = apply(x, ids, weights, (*mixed, only), impl)
    expected = reference.experts(x, ids, weights, projector((*mixed, only)), EXPERTS)
    other = reference.experts(x, ids, weights, projector((gate, up, only)), EXPERTS)
    bound = TOLERANCES["float_experts"].value * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound)
    assert np.abs(other - expected).max() > 2 * bound


@impls
@pytest.mark.parametrize("scheme", ["w8a8-g32", "w4a8-g32", "w8a16-g32", "w4a16-g32", None])
def test_case_56_permuting_experts_with_their_ids_changes_nothing(scheme: str | None, impl: str) -> None:
    ids = route_outside(17)
    weights = combine_weights(ids)
    x, stacks = random_example(len(ids), None if scheme is None else parse_scheme(scheme))
    order = np.random.default_rng(5).permutation(EXPERTS)
    moved = jax.tree.map(lambda leaf: leaf[:, order], stacks)
    here = (ids >= 0) & (ids < EXPERTS)
    moved_ids = np.where(here, np.argsort(order)[np.where(here, ids, 0)], ids).astype(np.int32)
    assert (moved_ids != ids).any()
    np.testing.assert_array_equal(apply(x, moved_ids, weights, moved, impl), apply(x, ids, weights, stacks, impl))


@impls
@pytest.mark.parametrize("scheme", ["w8a8-channel", "w4a8-g64", "w4a8-channel"])
def test_case_15_a_row_does_not_depend_on_its_batch(scheme: str, impl: str) -> None:
    x, stacks = random_example(65, parse_scheme(scheme))
    ids = route(65, 2)
    weights = np.random.default_rng(6).uniform(size=ids.shape).astype(np.float32)
    alone = apply(x[:1], ids[:1], weights[:1], stacks, impl)
    for rows in (2, 7, 8, 9, 64, 65):
        batch = (np.roll(array[:rows], rows // 2, axis=0) for array in (x, ids, weights))
        np.testing.assert_array_equal(apply(*batch, stacks, impl)[rows // 2], alone[0])


@impls
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_case_49_rows_that_nobody_routes_do_not_leak(bad: float, impl: str) -> None:
    ids = route_outside(17)
    ids[[0, 16]] = [-1, EXPERTS, -5]  # also the row that fills up tiles
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids))
    expected = exact_result(x, ids, weights, stacks)
    x[(ids < 0).all(axis=1) | (ids >= EXPERTS).all(axis=1)] = bad
    x[[0, 16]] = bad
    weights[(ids < 0) | (ids >= EXPERTS)] = bad
    np.testing.assert_array_equal(apply(x, ids, weights, stacks, impl), expected)


@impls
@bits_of_weights
def test_case_49_experts_that_nobody_routes_do_not_leak(bits: Bits, impl: str) -> None:
    ids = ROUTINGS["empty experts"]
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids), bits=bits)
    expected = exact_result(x, ids, weights, stacks)
    unused = np.setdiff1d(np.arange(EXPERTS), ids)
    for stack in stacks:
        stack.scale[:, unused] = np.nan
        stack.scale[1 - LAYER] = np.nan  # nor does another layer
    np.testing.assert_array_equal(apply(x, ids, weights, stacks, impl), expected)


@impls
def test_a_nan_row_damages_only_itself(impl: str) -> None:
    ids = ROUTINGS["all to one"]
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids))
    expected = exact_result(x, ids, weights, stacks)
    x[0, 5] = np.nan
    out = apply(x, ids, weights, stacks, impl)
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:], expected[1:])


def random_biases(seed: int = 7, dtype: type = np.float32) -> Biases:
    generator = np.random.default_rng(seed)
    widths = (FFN, FFN, EMBED)
    return tuple(generator.normal(size=(LAYERS, EXPERTS, width)).astype(dtype) for width in widths)  # pyright: ignore


def oracle(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, stacks: Stacks, activation: Activation, biases: Biases | None
) -> np.ndarray:
    named = None if biases is None else dict(zip(("gate", "up", "down"), (bias[LAYER] for bias in biases), strict=True))
    options = {"kind": activation.kind, "limit": activation.limit, "biases": named}
    return reference.experts(x, ids, weights, projector(stacks), EXPERTS, **options)


@impls
@pytest.mark.parametrize("scheme", ["w8a8-g32", "w4a8-g32", "w4a16-g32", None])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("limit", [None, 0.75])
@pytest.mark.parametrize("kind", ["swiglu", "gpt_oss"])
def test_activations_and_biases_are_the_oracle(
    kind: Literal["swiglu", "gpt_oss"], limit: float | None, biased: bool, scheme: str | None, impl: str
) -> None:
    parsed, activation = None if scheme is None else parse_scheme(scheme), Activation(kind=kind, limit=limit)
    ids = route_outside(17)
    weights = np.random.default_rng(4).uniform(size=ids.shape).astype(np.float32)
    x, stacks = random_example(len(ids), parsed)
    biases = random_biases() if biased else None
    expected = oracle(x, ids, weights, stacks, activation, biases)
    tolerance = "int8_experts" if parsed is not None and parsed.activation_bits == 8 else "float_experts"
    bound = TOLERANCES[tolerance].value * np.abs(expected).max()
    out = apply(x, ids, weights, stacks, impl, activation=activation, biases=biases)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound)
    if limit is not None:
        free = oracle(x, ids, weights, stacks, Activation(kind=kind), biases)
        assert np.abs(free - expected).max() > 5 * bound, "the clamp matters"


@impls
@pytest.mark.parametrize("changed", [0, 1, 2], ids=["gate", "up", "down"])
def test_each_bias_is_added_in_float32_whatever_its_dtype(changed: int, impl: str) -> None:
    ids = route_outside(17)
    weights = combine_weights(ids)
    x, stacks = random_example(len(ids), None)
    x = x.astype(jnp.bfloat16)
    narrow = list(random_biases(dtype=jnp.bfloat16))
    wide = [bias.astype(np.float32) for bias in narrow]
    out = apply(x, ids, weights, stacks, impl, biases=tuple(narrow))
    np.testing.assert_array_equal(out, apply(x, ids, weights, stacks, impl, biases=tuple(wide)))
    wide[changed] = -wide[changed]
    assert (apply(x, ids, weights, stacks, impl, biases=tuple(wide)) != out).any()


@impls
def test_a_down_bias_is_weighted_and_only_of_experts_that_are_here(impl: str) -> None:
    ids = route_outside(17)
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids))
    x[:] = 0  # what is left is the bias
    gate, up, down = (np.zeros_like(bias) for bias in random_biases())
    down[LAYER] = np.random.default_rng(8).integers(-8, 9, size=down[LAYER].shape)
    down[1 - LAYER] = np.nan
    out = apply(x, ids, weights, stacks, impl, biases=(gate, up, down))
    here = (ids >= 0) & (ids < EXPERTS)
    shares = np.where(here, weights, 0)[..., None] * down[LAYER][np.where(here, ids, 0)]
    np.testing.assert_array_equal(out, shares.sum(axis=1))


@pytest.mark.parametrize("kind", ["swiglu", "gpt_oss"])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_the_clamp_keeps_nan_and_cuts_gate_above_and_up_on_both_sides(
    width: int, kind: Literal["swiglu", "gpt_oss"]
) -> None:
    """At several widths, since vectorised and scalar comparisons may treat NaN differently."""
    values = np.float32([np.nan, -1e6, -7, -2, -0.5, 0, 0.5, 2, 7, 1e6, np.inf])
    gate, up = (grid.reshape(-1, 1).repeat(width, axis=1) for grid in np.meshgrid(values, values))
    activation = Activation(kind=kind, limit=2.0)
    out = np.asarray(jax.jit(lambda gate, up: activation(gate, up))(gate, up))
    bad = np.isnan(gate) | np.isnan(up)
    np.testing.assert_array_equal(np.isnan(out), bad)
    with np.errstate(over="ignore"):
        same = reference.activate(gate, up, kind, 2.0)
        cut = reference.activate(np.minimum(gate, 2), np.clip(up, -2, 2), kind, None)
    np.testing.assert_array_equal(same, cut)
    bound = TOLERANCES["float_experts"].value * np.abs(cut[~bad]).max()
    np.testing.assert_allclose(out[~bad], cut[~bad], rtol=0, atol=bound)
    assert (out[~bad & (gate <= -1e6)] == 0).all()


def test_what_gpt_oss_computes() -> None:
    gate, up = np.float32([[0.5, 3, -1]]), np.float32([[1, -4, 0]])
    out = Activation(kind="gpt_oss", limit=2.5)(jnp.asarray(gate), jnp.asarray(up))
    expected = [[2 * 0.5 / (1 + np.exp(-0.851)), -1.5 * 2.5 / (1 + np.exp(-4.255)), -1 / (1 + np.exp(1.702))]]
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCES["float_experts"].value)


@impls
@bits_of_weights
@pytest.mark.parametrize("activation", [SWIGLU, Activation(kind="gpt_oss", limit=2.0)], ids=lambda a: a.kind)
def test_a_nan_reaches_the_result_through_the_clamp(activation: Activation, bits: Bits, impl: str) -> None:
    ids = route(17, 3)
    x, stacks = random_example(len(ids), Scheme(weight_bits=bits, group=32))
    weights = combine_weights(ids)
    clean = apply(x, ids, weights, stacks, impl, activation=activation)
    x[4, 9] = np.nan
    out = apply(x, ids, weights, stacks, impl, activation=activation)
    assert np.isfinite(clean).all() and np.isnan(out[4]).all()
    np.testing.assert_array_equal(np.delete(out, 4, axis=0), np.delete(clean, 4, axis=0))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_positive_number(limit: float) -> None:
    with pytest.raises(ConfigError, match=f"an activation limit of {limit} is not a positive number"):
        Activation(limit=limit)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises((ConfigError, TypeCheckError), match="gelu"):
        Activation(kind="gelu")  # pyright: ignore


def test_biases_that_do_not_fit_are_named() -> None:
    ids, weights = np.int32([[0, 1]]), np.ones((1, 2), np.float32)
    x, stacks = random_example(1, None)
    gate, up, down = map(jnp.asarray, random_biases())
    operands = [jnp.asarray(array) for array in (x, ids, weights, *stacks)]
    with pytest.raises((ValueError, TypeCheckError), match="biases"):
        experts(*operands, layer=0, total_experts=EXPERTS, biases=(gate, up, down[:, :, :5]))
    with pytest.raises(ValueError) as error:
        experts(*operands, layer=0, total_experts=EXPERTS, biases=(gate[:, :5], up[:, :5], down[:, :5]))
    assert str(error.value) == (
        "experts: biases [2, 5, 40], [2, 5, 40], [2, 5, 72] do not fit gate [2, 6, 40, 72], up [2, 6, 40, 72] and down "
        "[2, 6, 72, 40]"
    )


@impls
@pytest.mark.parametrize("name", ["w8a8-g128", "w4a8-g128", "w4a8-channel"])
def test_an_expert_is_read_in_place(name: str, impl: str) -> None:
    """No copy of a stack, widened or not: more layers and more experts need no more memory for weights."""
    scheme, ffn, embed = parse_scheme(name), 256, 512

    def temporary_bytes(layers: int, count: int) -> int:
        def weight(*shape: int) -> QArray:
            return jax.eval_shape(partial(quantize_weight, scheme=scheme), jax.ShapeDtypeStruct(shape, jnp.float32))

        gate, down = weight(layers, count, ffn, embed), weight(layers, count, embed, ffn)
        x, ids = jax.ShapeDtypeStruct((8, embed), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.int32)
        weights, layer = jax.ShapeDtypeStruct((8, 2), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        lowered = run.lower(x, ids, weights, (gate, gate, down), layer, total_experts=64, impl=impl)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one_expert = 3 * ffn * embed
    few, layers, both = temporary_bytes(2, 8), temporary_bytes(16, 8), temporary_bytes(16, 32)
    assert layers <= few + 4096
    # A tile of two rows an expert grows with their number.
    assert both <= few + 24 * 2 * embed * 4 + 16384 < few + one_expert


def test_stacks_that_do_not_fit_are_named() -> None:
    ids = np.int32([[0, 1]])
    weights = np.ones((1, 2), np.float32)
    x, (gate, up, down) = random_example(1, None)

    def call(*operands: np.ndarray) -> None:
        experts(*map(jnp.asarray, operands), layer=0, total_experts=EXPERTS)

    for operands in [(gate, gate, gate), (gate[:, :5], up, down), (gate, up, down[:, :5]), (gate, up, down[:1])]:
        with pytest.raises(ValueError, match=r"experts: x \[1, 72\], gate .* do not fit together"):
            call(x, ids, weights, *operands)
    with pytest.raises(ValueError, match="do not fit together"):
        call(x[:, :71], ids, weights, gate, up, down)
    with pytest.raises((ValueError, TypeCheckError)):
        call(x, ids, weights[:, :1], gate, up, down)


def test_an_unknown_implementation_is_refused() -> None:
    x, stacks = random_example(1, None)
    with pytest.raises(UnsupportedError, match="experts has no implementation 'cuda'; it has "):
        run(x, np.int32([[0, 1]]), np.ones((1, 2), np.float32), stacks, np.int32(0), EXPERTS, "cuda")
