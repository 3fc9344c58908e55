"""Contract of experts, for every implementation: any routing, exact sums, no row or expert that leaks into another."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jaxmoe.errors import UnsupportedError
from jaxmoe.ops import experts as op
from jaxmoe.ops.dispatch import choose
from jaxmoe.ops.experts import experts, reference
from jaxmoe.ops.linear import reference as linear_reference
from jaxmoe.quant.qarray import QArray, Weight
from jaxmoe.quant.scheme import Scheme
from tests.tolerances import TOLERANCES

EMBED, FFN, EXPERTS, LAYERS, LAYER = 72, 40, 6, 2, 1
"""Neither width is a multiple of the group, so that last groups are short."""
GROUP = 32

Stacks = tuple[Weight, Weight, Weight]

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])


@partial(jax.jit, static_argnames=("total_experts", "impl"))
def run(
    x: jax.Array, ids: jax.Array, weights: jax.Array, stacks: Stacks, layer: jax.Array, total_experts: int, impl: str
) -> jax.Array:
    return experts(x, ids, weights, *stacks, layer=layer, total_experts=total_experts, impl=impl)


def apply(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, stacks: Stacks, impl: str, *, total_experts: int = EXPERTS
) -> np.ndarray:
    """The jitted operator with a traced layer index; skips what the implementation refuses."""
    arguments, layer = (x, ids, weights, *stacks), np.int32(LAYER)
    try:
        choose("experts", op.IMPLS, impl, *arguments, layer=layer, total_experts=total_experts)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return np.asarray(run(x, ids, weights, stacks, layer, total_experts, impl))


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


def exact_example(tokens: int, num_experts: int = EXPERTS) -> tuple[np.ndarray, tuple[QArray, QArray, QArray]]:
    """Operands on which every step is exact in float32.

    Each row of x holds 64 first and 127 second. gate picks the 64 (times a power of two), where silu(g) == g; up picks
    one feature with a sign, the 127 among them; so the largest hidden value is 127 * 2**n and its grid is exact too.
    """
    generator = np.random.default_rng(2)
    x = generator.integers(-127, 128, size=(tokens, EMBED)).astype(np.float32)
    x[:, 0], x[:, 1] = 64, 127
    lead = (LAYERS, num_experts)
    gate = np.zeros((*lead, FFN, EMBED), np.int8)
    gate[..., 0] = 1
    up = np.zeros((*lead, FFN, EMBED), np.int8)
    chosen = generator.integers(1, EMBED, size=(*lead, FFN, 1))
    chosen[..., 0, :] = 1
    np.put_along_axis(up, chosen, generator.choice(np.int8([-1, 1]), size=chosen.shape), axis=-1)
    down = generator.integers(-127, 128, size=(*lead, EMBED, FFN)).astype(np.int8)

    def quantized(values: np.ndarray, scale: np.ndarray) -> QArray:
        shape = (*values.shape[:-1], -(-values.shape[-1] // GROUP))
        return QArray(qvalue=values, scale=np.broadcast_to(scale, shape).astype(np.float32), scheme=Scheme(group=GROUP))

    gate_scale = 2.0 ** generator.integers(0, 3, size=(*lead, 1, 1))
    down_scale = 2.0 ** generator.integers(-2, 1, size=(*lead, EMBED, 2))
    return x, (quantized(gate, gate_scale), quantized(up, np.float32(1)), quantized(down, down_scale))


def exact_result(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, stacks: tuple[QArray, QArray, QArray]
) -> np.ndarray:
    """The sum over the slots in float64, with silu left out: not the oracle, but what the oracle must give too."""
    gate, up, down = (
        linear_reference.dequantize(w.qvalue[LAYER], w.scale[LAYER], GROUP).astype(np.float64) for w in stacks
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
        values = generator.integers(-127, 128, size=shape).astype(np.int8)
        scale = generator.uniform(0.5, 1.5, size=(*shape[:-1], scheme.num_groups(size))) / (64 * size**0.5)
        return QArray(qvalue=values, scale=scale.astype(np.float32), scheme=scheme)

    return x, (weight(FFN, EMBED), weight(FFN, EMBED), weight(EMBED, FFN))


def projector(stacks: Stacks) -> Callable[[str, int, np.ndarray], np.ndarray]:
    """What the oracle multiplies with."""
    names = dict(zip(("gate", "up", "down"), stacks, strict=True))

    def project(name: str, expert: int, rows: np.ndarray) -> np.ndarray:
        w = names[name]
        if not isinstance(w, QArray):
            return rows @ w[LAYER, expert].T
        values, scale = w.qvalue[LAYER, expert], w.scale[LAYER, expert]
        if w.scheme.activation_bits == 8:
            return linear_reference.w8a8(rows, values, scale, w.group)
        return rows @ linear_reference.dequantize(values, scale, w.group).T

    return project


@impls
@pytest.mark.parametrize(
    ("routing", "dtype"), [*((routing, jnp.float32) for routing in ROUTINGS), ("some elsewhere", jnp.bfloat16)]
)
def test_every_routing_is_exact(routing: str, dtype: jnp.dtype, impl: str) -> None:
    ids = ROUTINGS[routing]
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids))
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
        (Scheme(group=32, activation_bits=16), "float_experts"),
        (None, "float_experts"),
    ],
    ids=["w8a8-g32", "w8a8-channel", "w8a16-g32", "float32"],
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
@pytest.mark.parametrize("bits", [8, 16, None])
def test_case_56_permuting_experts_with_their_ids_changes_nothing(bits: int | None, impl: str) -> None:
    ids = route_outside(17)
    weights = combine_weights(ids)
    if bits == 8:
        x, stacks = exact_example(len(ids))
    else:
        x, stacks = random_example(len(ids), None if bits is None else Scheme(group=32, activation_bits=16))
    order = np.random.default_rng(5).permutation(EXPERTS)
    moved = jax.tree.map(lambda leaf: leaf[:, order], stacks)
    here = (ids >= 0) & (ids < EXPERTS)
    moved_ids = np.where(here, np.argsort(order)[np.where(here, ids, 0)], ids).astype(np.int32)
    assert (moved_ids != ids).any()
    np.testing.assert_array_equal(apply(x, moved_ids, weights, moved, impl), apply(x, ids, weights, stacks, impl))


@impls
def test_case_15_a_row_does_not_depend_on_its_batch(impl: str) -> None:
    x, stacks = random_example(65, Scheme(group=None))
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
def test_case_49_experts_that_nobody_routes_do_not_leak(impl: str) -> None:
    ids = ROUTINGS["empty experts"]
    weights = combine_weights(ids)
    x, stacks = exact_example(len(ids))
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
