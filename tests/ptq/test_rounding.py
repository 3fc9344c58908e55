"""Rounding methods against float64 oracles, and their laws: never worse than min/max, the same in any company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, PartitionSpec

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.rounding import METHODS, MethodName, NearestOptions, Options, method_of, round_weight
from jaxmoe.ptq.rounding.clip import ClipOptions
from jaxmoe.ptq.rounding.cold import COLD_POLICIES, ColdPolicy, alike, cold_moment, shrunk
from jaxmoe.ptq.rounding.gptq import GptqOptions
from jaxmoe.ptq.rounding.learned import LearnedOptions
from jaxmoe.ptq.rounding.ssz import SszOptions
from jaxmoe.quant.qarray import QArray, quantize_weight, validate_shapes
from jaxmoe.quant.scheme import parse_scheme
from tests.ptq.rounding_oracle import (
    RUN,
    by_groups,
    clip_slice,
    expand,
    gram,
    inputs,
    ssz_slice,
    weighted_norms,
)
from tests.tolerances import TOLERANCES

OPTIONS: dict[MethodName, Options] = {
    "nearest": NearestOptions(),
    "ssz": SszOptions(),
    "clip": ClipOptions(),
    "gptq": GptqOptions(),
    "learned": LearnedOptions(),
}
SEARCHES: list[MethodName] = ["ssz", "clip"]
LAWS: list[MethodName] = ["ssz", "clip", "gptq"]
EXPERTS, OUT, SIZE, GROUP = 3, 6, 40, 16  # groups of 16, 16 and 8
WIDE = 96


def run(name: MethodName, weight, statistic, group: int = GROUP, bits: int = 4, options=None):
    statistic = None if statistic is None else jnp.asarray(statistic)
    rounded = RUN[name](jnp.asarray(weight), statistic, group, bits, OPTIONS[name] if options is None else options)
    return np.asarray(rounded.qvalue), np.asarray(rounded.scale), np.asarray(rounded.status)


def heavy(seed: int, shape=(EXPERTS, OUT, SIZE)) -> np.ndarray:
    """Weights with heavy tails."""
    return np.random.default_rng(seed).standard_t(3, size=shape).astype(np.float32)


def statistic_of(name: MethodName, seed: int, size: int = SIZE) -> np.ndarray:
    """What a method needs, [experts, ...]."""
    rng = np.random.default_rng(seed)
    hessians = np.stack([gram(inputs(rng, 100, size)) for _ in range(EXPERTS)])
    return hessians if METHODS[name].needs == "hessian" else np.ascontiguousarray(np.diagonal(hessians, 0, 1, 2))


def same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", SEARCHES)
def test_the_oracle_finds_the_same(name: MethodName, bits: int) -> None:
    weight, importance = heavy(1)[0], statistic_of(name, 1)[0]
    limit = 2 ** (bits - 1) - 1
    factors = (1 - 0.5 * np.arange(1, 51) / 50).astype(np.float32)

    def one(x: np.ndarray, channels: slice):
        weights = importance[channels].astype(np.float64)
        return ssz_slice(x, weights, limit, 50) if name == "ssz" else clip_slice(x, weights, limit, factors)

    q, scale, status = run(name, weight, importance, bits=bits)
    expected_q, expected_scale = by_groups(weight, GROUP, one)
    assert q.dtype == np.int8 and scale.dtype == np.float32 and status == 0
    np.testing.assert_array_equal(q, expected_q)
    np.testing.assert_allclose(scale, expected_scale, rtol=TOLERANCES["rounding_scale"].value)
    assert (scale != run("nearest", weight, None, bits=bits)[1]).any()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
loud = st.one_of(st.just(0.0), st.floats(2**-20, 2**20, width=32))
cases = st.tuples(hnp.arrays(np.float32, (3, SIZE), elements=finite), hnp.arrays(np.float32, (SIZE,), elements=loud))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", SEARCHES)
@given(case=cases)
def test_no_group_is_ever_worse_than_with_min_max(name: MethodName, bits: int, case) -> None:
    weight, importance = case
    q, scale, _ = run(name, weight, importance, bits=bits)
    assert (scale > 0).all() and np.isfinite(scale).all()
    assert np.abs(q.astype(np.int32)).max() < 2 ** (bits - 1)
    error, signal = weighted_norms(weight, q, scale, importance, GROUP)
    plain_q, plain_scale, _ = run("nearest", weight, None, bits=bits)
    plain_error, _ = weighted_norms(weight, plain_q, plain_scale, importance, GROUP)
    assert (error <= plain_error + TOLERANCES["rounding_norm"].value * signal).all()


@pytest.mark.parametrize("name", SEARCHES)
def test_int4_is_clearly_better_on_heavy_tails_and_knows_what_matters(name: MethodName) -> None:
    weight, importance = heavy(2, (32, SIZE)), statistic_of(name, 2)[0]
    errors = {}
    for kind, method, known in [("min/max", "nearest", None), ("plain", name, None), ("weighted", name, importance)]:
        q, scale, _ = run(method, weight, known)
        errors[kind] = np.sum(weighted_norms(weight, q, scale, importance, GROUP)[0] ** 2)
    assert errors["weighted"] < 0.8 * errors["min/max"]
    assert errors["weighted"] < 0.9 * errors["plain"]


@pytest.mark.parametrize("power", [-90, -3, 1, 90])
@pytest.mark.parametrize("name", LAWS)
def test_a_power_of_two_scales_the_scales_and_nothing_else(name: MethodName, power: int) -> None:
    weight, statistic = heavy(3), statistic_of(name, 3)
    factor = np.float32(2.0**power)
    q, scale, status = run(name, weight, statistic)
    same(run(name, weight * factor, statistic), (q, scale * factor, status))
    # Four times the tokens, or the sum for the mean.
    same(run(name, weight, statistic * np.float32(4)), (q, scale, status))


@pytest.mark.parametrize("name", LAWS)
def test_rows_are_independent(name: MethodName) -> None:
    weight, statistic = heavy(4), statistic_of(name, 4)
    q, scale, status = run(name, weight, statistic)
    order = np.random.default_rng(0).permutation(OUT)
    same(run(name, weight[:, order], statistic), (q[:, order], scale[:, order], status))
    same(run(name, np.concatenate([weight, weight[:, :2]], axis=1), statistic)[0:1], [np.concatenate([q, q[:, :2]], 1)])


@pytest.mark.parametrize("name", ["ssz", "clip", pytest.param("gptq", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("group", "bits"), [(32, 4), (WIDE, 8)])
def test_an_expert_comes_out_alike_in_any_company(name: MethodName, group: int, bits: int) -> None:
    """Of a shape whose scales differ by an ulp when the methods are vmapped over one expert and over several."""
    weight, statistic = heavy(5, (EXPERTS, 16, WIDE)), statistic_of(name, 5, WIDE)
    q, scale, status = run(name, weight, statistic, group, bits)
    for index in range(EXPERTS):
        alone = run(name, weight[index], statistic[index], group, bits)
        same(alone, (q[index], scale[index], status[index]))
        part = slice(index, index + 1)
        same(run(name, weight[part], statistic[part], group, bits), (q[part], scale[part], status[part]))
    # Others: one of zeros, one that no tokens reached, many more.
    others, known = np.concatenate([weight] * 3), np.concatenate([statistic] * 3)
    others[0], known[1] = 0, 0
    many_q, many_scale, many_status = run(name, others, known, group, bits)
    same((many_q[2:6], many_scale[2:6], many_status[2:6]), tuple(x[[2, 0, 1, 2]] for x in (q, scale, status)))


@pytest.mark.parametrize("name", LAWS)
def test_experts_spread_over_devices_come_out_alike(name: MethodName) -> None:
    weight, statistic = heavy(12, (EXPERTS, 16, WIDE)), statistic_of(name, 12, WIDE)
    weight, statistic = np.concatenate([weight] * 2), np.concatenate([statistic] * 2)
    mesh, spec = Mesh(np.array(jax.devices()[:3]), ("experts",)), PartitionSpec("experts")
    method, options = METHODS[name].run, OPTIONS[name]
    spread = jax.shard_map(lambda w, s: method(w, s, 32, 4, options), mesh=mesh, in_specs=spec, out_specs=spec)
    rounded = jax.jit(spread)(weight, statistic)
    same((rounded.qvalue, rounded.scale, rounded.status), run(name, weight, statistic, 32, 4))


@pytest.mark.parametrize("name", LAWS)
def test_vmap_is_the_same_as_leading_axes(name: MethodName) -> None:
    weight, statistic = jnp.asarray(heavy(6)), jnp.asarray(statistic_of(name, 6))
    method, options = METHODS[name].run, OPTIONS[name]
    mapped = jax.jit(jax.vmap(lambda w, s: method(w, s, GROUP, 4, options)))(weight, statistic)
    same((mapped.qvalue, mapped.scale, mapped.status), run(name, weight, statistic))
    twice = run(name, weight[None], statistic[None])
    same([x[0] for x in twice], (mapped.qvalue, mapped.scale, mapped.status))


@pytest.mark.parametrize("name", SEARCHES)
def test_zero_groups_stay_zero_and_channels_without_importance_round_to_nearest(name: MethodName) -> None:
    weight, importance = heavy(7), statistic_of(name, 7)
    weight[0, 2, GROUP : 2 * GROUP] = 0
    weight[0, 3, 2 * GROUP :] = 0  # the short group
    weight[1] = 0
    importance[2] = 0
    q, scale, _ = run(name, weight, importance)
    assert (q[weight == 0] == 0).all() and (scale > 0).all() and np.isfinite(scale).all()
    assert scale[0, 2, 1] == scale[0, 3, 2] == 1 and (scale[1] == 1).all()
    plain_q, plain_scale, _ = run("nearest", weight, None)
    same((q[2], scale[2]), (plain_q[2], plain_scale[2]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SEARCHES)
def test_what_is_not_finite_shows_in_its_groups_and_nowhere_else(name: MethodName, bad: float) -> None:
    weight, importance = heavy(8), statistic_of(name, 8)
    q, scale, _ = run(name, weight, importance)
    weight[0, 1, 3], importance[1, SIZE - 1] = bad, bad
    bad_q, bad_scale, _ = run(name, weight, importance)
    hit = np.zeros(scale.shape, bool)
    hit[0, 1, 0], hit[1, :, 2] = True, True
    assert np.isnan(bad_scale[hit]).all()
    wide = expand(hit, GROUP, SIZE) > 0
    assert (bad_q[wide] == 0).all()
    same((bad_q[~wide], bad_scale[~hit]), (q[~wide], scale[~hit]))


@pytest.mark.parametrize("name", LAWS)
def test_narrow_floats_are_widened_first(name: MethodName) -> None:
    weight, statistic = jnp.asarray(heavy(9), jnp.bfloat16), statistic_of(name, 9)
    same(run(name, weight, statistic), run(name, weight.astype(jnp.float32), statistic))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "learned"])  # which has a file of its own
@pytest.mark.parametrize("text", ["w4a8-g32", "w8a8-channel"])
def test_the_result_is_a_weight_of_the_scheme(name: MethodName, text: str) -> None:
    scheme, weight = parse_scheme(text), jnp.asarray(heavy(10))
    statistic = None if METHODS[name].needs == "nothing" else jnp.asarray(statistic_of(name, 10))
    array, status = jax.jit(round_weight, static_argnums=(2, 3))(weight, statistic, scheme, OPTIONS[name])
    assert isinstance(array, QArray) and array.shape == weight.shape and status.shape == (EXPERTS,)
    validate_shapes(array, name=name)
    group = scheme.group_size(SIZE)
    q, scale, _ = run(name, weight, statistic, group, scheme.weight_bits)
    same((array.integers(), array.scale), (q, scale))
    if name == "nearest":
        same(jax.tree.leaves(array), jax.tree.leaves(jax.jit(quantize_weight, static_argnums=1)(weight, scheme)))


def test_each_method_is_found_by_its_options() -> None:
    for name, options in OPTIONS.items():
        assert method_of(options) is METHODS[name]


def test_a_statistic_that_does_not_fit_is_refused() -> None:
    weight, scheme = jnp.zeros((2, 3, 64)), parse_scheme("w4a8-g32")
    for options, statistic, message in [
        (GptqOptions(), None, r"round_gptq .* \[2, 3, 64\] needs hessian of shape \(2, 64, 64\), got None"),
        (GptqOptions(), jnp.zeros((2, 64)), r"got \(2, 64\)"),
        (SszOptions(), jnp.zeros((2, 32)), r"needs importance of shape \(2, 64\), got \(2, 32\)"),
        (NearestOptions(), jnp.zeros((2, 64)), r"needs nothing of shape None"),
    ]:
        with pytest.raises(ValueError, match=message):
            round_weight(weight, statistic, scheme, options)
    with pytest.raises(RecipeError, match="odd"):
        round_weight(jnp.zeros((2, 33)), None, scheme, SszOptions())


def test_options_out_of_range_are_refused() -> None:
    for make, message in [
        (lambda: SszOptions(steps=0), "steps = 0"),
        (lambda: ClipOptions(steps=0), "steps = 0"),
        (lambda: ClipOptions(smallest=1.0), "smallest = 1.0"),
        (lambda: GptqOptions(damping=0.0), "damping = 0.0"),
        (lambda: GptqOptions(damping=0.5, most_damping=0.1), "damping = 0.5 and most_damping = 0.1"),
        (lambda: GptqOptions(steps=0), "steps = 0"),
    ]:
        with pytest.raises(RecipeError, match=message):
            make()


moments = st.one_of(
    hnp.arrays(np.float64, (4,), elements=st.floats(0, 1e6)),
    hnp.arrays(np.float64, (4, 4), elements=st.floats(-1e6, 1e6)).map(lambda x: x @ x.T / 1e6),
)


@given(own=moments, prior=moments, count=st.integers(0, 10**6))
def test_shrinking_is_as_if_tokens_of_the_layer_had_been_seen(own: np.ndarray, prior: np.ndarray, count: int) -> None:
    """As many as there are channels: own statistics of none count nothing, those of very many everything."""
    if own.shape != prior.shape:
        prior = own[::-1]
    channels = own.shape[-1]
    expected = (count * own + channels * prior) / (count + channels)
    scale = max(np.abs(own).max(), np.abs(prior).max())
    np.testing.assert_allclose(shrunk(own, count, prior), expected, rtol=0, atol=TOLERANCES["shrink"].value * scale)
    np.testing.assert_array_equal(shrunk(own, 0, prior), prior)


def test_shrinking_gives_few_tokens_full_rank() -> None:
    rng = np.random.default_rng(11)
    own, layer = gram(rng.normal(size=(2, SIZE))) / 2, gram(rng.normal(size=(500, SIZE))) / 500
    assert np.linalg.matrix_rank(own) == 2 and np.linalg.matrix_rank(shrunk(own, 2, layer)) == SIZE
    assert np.linalg.eigvalsh(shrunk(own, 2, layer)).min() > 0


def test_inputs_that_no_other_weight_shares() -> None:
    np.testing.assert_array_equal(alike(np.array([1.0, 2, 6])), [3, 3, 3])
    np.testing.assert_array_equal(alike(np.array([[2.0, 5], [5, 4]])), [[3, 0], [0, 3]])
    assert not alike(np.zeros(3)).any() and not alike(np.zeros((3, 3))).any()


@pytest.mark.parametrize("policy", COLD_POLICIES)
def test_each_policy_decides_per_expert(policy: ColdPolicy) -> None:
    own, prior = np.array([1.0, 3]), np.array([50.0, 70])

    def moment(count: int) -> np.ndarray | None:
        return cold_moment(policy, own, count, prior, min_tokens=16, where="layer 3, expert 5")

    if policy == "shrink":
        for count in (0, 3, 16, 99):
            np.testing.assert_array_equal(moment(count), shrunk(own, count, prior))
        return
    for count in (16, 99):
        assert moment(count) is own
    for count in (0, 15):
        if policy == "error":
            with pytest.raises(
                RecipeError, match=f"layer 3, expert 5 saw {count} calibration tokens, fewer than the 16"
            ):
                moment(count)
        else:
            assert moment(count) is (None if policy == "rtn" else prior)
