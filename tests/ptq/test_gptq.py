"""GPTQ against the textbook in float64, on Hessians good, singular, indefinite and missing, and on cold experts."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ptq.rounding import NearestOptions
from jaxmoe.ptq.rounding.cold import shrunk
from jaxmoe.ptq.rounding.gptq import NEAREST, GptqOptions, Order, ScaleRule
from tests.ptq.rounding_oracle import RUN, expand, gram, inputs, ordered_gptq, output_error, textbook_gptq
from tests.tolerances import TOLERANCES

OUT, SIZE, GROUP = 6, 40, 16
MINMAX = GptqOptions(scale="minmax", order="natural")
ORACLES = {"natural": textbook_gptq, "activity": ordered_gptq}
orders = pytest.mark.parametrize("order", ORACLES)


def gptq(weight, hessian, group: int = GROUP, bits: int = 4, options: GptqOptions = MINMAX):
    rounded = RUN["gptq"](jnp.asarray(weight), jnp.asarray(hessian), group, bits, options)
    return np.asarray(rounded.qvalue), np.asarray(rounded.scale), np.asarray(rounded.status)


def nearest(weight, group: int = GROUP, bits: int = 4):
    rounded = RUN["nearest"](jnp.asarray(weight), None, group, bits, NearestOptions())
    return np.asarray(rounded.qvalue), np.asarray(rounded.scale)


def normal(seed: int, shape=(OUT, SIZE)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def hessian_of(seed: int, tokens: int = 200, size: int = SIZE) -> np.ndarray:
    return gram(inputs(np.random.default_rng(seed), tokens, size))


@orders
@pytest.mark.parametrize("rule", ["minmax", "ssz"])
@pytest.mark.parametrize(("size", "group"), [(SIZE, GROUP), (300, 300), (7, 7), (9, 1)])
def test_the_textbook_finds_the_same_int4(size: int, group: int, rule: ScaleRule, order: Order) -> None:
    weight, hessian = normal(1, (OUT, size)), hessian_of(1, 400, size)
    q, scale, status = gptq(weight, hessian, group, 4, GptqOptions(scale=rule, order=order))
    expected_q, expected_scale = ORACLES[order](weight, hessian, group, 7, 0.01, rule)
    assert status == 0 and q.dtype == np.int8 and scale.dtype == np.float32
    np.testing.assert_array_equal(q, expected_q)
    np.testing.assert_allclose(scale, expected_scale, rtol=TOLERANCES["gptq_scale"].value)


@orders
@pytest.mark.parametrize("rule", ["minmax", "ssz"])
@pytest.mark.parametrize("group", [GROUP, SIZE])
def test_the_textbook_is_no_better_at_int8(group: int, rule: ScaleRule, order: Order) -> None:
    weight, hessian = normal(2), hessian_of(2)
    q, scale, _ = gptq(weight, hessian, group, 8, GptqOptions(scale=rule, order=order))
    expected = ORACLES[order](weight, hessian, group, 127, 0.01, rule)
    ours, theirs = output_error(weight, q, scale, group, hessian), output_error(weight, *expected, group, hessian)
    assert ours == pytest.approx(theirs, rel=TOLERANCES["gptq_error"].value)


@orders
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rule", ["minmax", "ssz"])
@pytest.mark.parametrize("group", [GROUP, SIZE])
def test_outputs_of_correlated_inputs_are_nearer_than_with_rounding_to_nearest(
    group: int, rule: ScaleRule, bits: int, order: Order
) -> None:
    for seed in range(3):
        weight, hessian = normal(seed), hessian_of(seed)
        q, scale, _ = gptq(weight, hessian, group, bits, GptqOptions(scale=rule, order=order))
        plain = output_error(weight, *nearest(weight, group, bits), group, hessian)
        assert output_error(weight, q, scale, group, hessian) < 0.5 * plain


def test_uncorrelated_inputs_round_to_nearest() -> None:
    weight = normal(4)
    loudness = np.exp(np.random.default_rng(4).normal(size=SIZE)).astype(np.float32)
    q, scale, status = gptq(weight, np.diag(loudness))
    plain_q, plain_scale = nearest(weight)
    assert status == 0
    np.testing.assert_array_equal(q, plain_q)
    np.testing.assert_array_equal(scale, plain_scale)


@orders
def test_dead_channels_are_rounded_to_nearest_and_never_zeroed(order: Order) -> None:
    weight, x = normal(5), inputs(np.random.default_rng(5), 200, SIZE)
    dead = [0, 17, SIZE - 1]
    x[:, dead] = 0
    q, scale, status = gptq(weight, gram(x), options=GptqOptions(scale="minmax", order=order))
    assert status == 0
    expected = np.clip(np.rint(weight / expand(scale, GROUP, SIZE)), -7, 7)
    np.testing.assert_array_equal(q[:, dead], expected[:, dead])
    assert (q[:, dead] != 0).any() and (q != expected).any()
    assert (q == ORACLES[order](weight, gram(x), GROUP, 7, 0.01, "minmax")[0]).all()


def test_the_order_is_that_of_the_inputs_and_the_scales_stay() -> None:
    """Channels in another order in the weight give the same numbers there; scales are those of rounding to nearest."""
    weight, x = normal(14), inputs(np.random.default_rng(14), 200, SIZE)
    options = GptqOptions(scale="minmax", order="activity")
    q, scale, _ = gptq(weight, gram(x), SIZE, 4, options)
    np.testing.assert_array_equal(scale, nearest(weight, SIZE)[1])
    turned = np.random.default_rng(0).permutation(SIZE)
    other_q, other_scale, _ = gptq(weight[:, turned], gram(x[:, turned]), SIZE, 4, options)
    np.testing.assert_array_equal(other_q, q[:, turned])
    np.testing.assert_array_equal(other_scale, scale)


@pytest.mark.parametrize("rule", ["minmax", "ssz"])
def test_one_token_is_a_singular_hessian_and_damping_is_enough(rule: ScaleRule) -> None:
    weight, hessian = normal(6), hessian_of(6, tokens=1)
    q, scale, status = gptq(weight, hessian, options=GptqOptions(scale=rule))
    assert status == 0 and (scale > 0).all() and np.isfinite(scale).all()
    assert output_error(weight, q, scale, GROUP, hessian) < output_error(weight, *nearest(weight), GROUP, hessian)


def test_damping_is_raised_until_it_is_enough_and_then_rounding_is_to_nearest() -> None:
    """Four experts of one batch: definite, raised once, never definite, without tokens."""
    weight = normal(7, (4, OUT, SIZE))
    hessian = np.stack([hessian_of(7)] * 4)
    mean = np.trace(hessian[0]) / SIZE
    hessian[1] -= np.float32(0.05 * mean) * np.eye(SIZE, dtype=np.float32)
    hessian[2] *= -1
    hessian[3] = 0
    q, scale, status = gptq(weight, hessian)
    assert status.tolist() == [0, 1, NEAREST, NEAREST]
    assert np.isfinite(scale).all() and (scale > 0).all()
    for expert in (0, 1):
        expected_q, _ = textbook_gptq(weight[expert], hessian[expert], GROUP, 7, [0.01, 0.1][expert], "minmax")
        np.testing.assert_array_equal(q[expert], expected_q)
    for expert in (2, 3):
        plain_q, plain_scale = nearest(weight[expert])
        np.testing.assert_array_equal(q[expert], plain_q)
        np.testing.assert_array_equal(scale[expert], plain_scale)
    for expert in range(4):
        alone = gptq(weight[expert], hessian[expert])
        for one, other in zip(alone, (q[expert], scale[expert], status[expert]), strict=True):
            np.testing.assert_array_equal(one, other)


def test_dampings_are_tenfold_up_to_the_most() -> None:
    assert GptqOptions().dampings == (0.01, 0.1, 1.0)
    assert GptqOptions(damping=0.02).dampings == (0.02, 0.2)
    assert GptqOptions(damping=1.0).dampings == (1.0,)


def test_zero_weights_stay_zero() -> None:
    weight = normal(8)
    weight[2] = 0
    q, scale, _ = gptq(weight, hessian_of(8))
    assert (q[2] == 0).all() and (scale[2] == 1).all() and (q[1] != 0).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_show_in_their_group_and_hand_nothing_on(bad: float) -> None:
    weight, hessian = normal(9), hessian_of(9)
    q, scale, _ = gptq(weight, hessian)
    weight[1, GROUP + 3] = bad
    bad_q, bad_scale, _ = gptq(weight, hessian)
    assert np.isnan(bad_scale[1, 1]) and (bad_q[1, GROUP : 2 * GROUP] == 0).all()
    assert np.isfinite(np.delete(bad_scale[1], 1)).all()
    others = np.arange(OUT) != 1
    np.testing.assert_array_equal(bad_q[others], q[others])
    np.testing.assert_array_equal(bad_scale[others], scale[others])
    _, row_scale, _ = gptq(weight, hessian, SIZE)
    assert np.isnan(row_scale[1, 0]) and np.isfinite(row_scale[others]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_hessian_that_is_not_finite_shows_everywhere(bad: float) -> None:
    hessian = np.stack([hessian_of(10)] * 2)
    hessian[1, 3, 5] = bad
    weight = normal(10, (2, OUT, SIZE))
    q, scale, _ = gptq(weight, hessian)
    assert np.isnan(scale[1]).all() and (q[1] == 0).all()
    assert np.isfinite(scale[0]).all()


@pytest.mark.parametrize("tokens", [0, 1, 8, 32])
def test_shrinking_is_never_worse_than_own_statistics_of_few_tokens(tokens: int) -> None:
    """Experts whose inputs differ from the layer's: each has a loudness and a shift of its own (made up, seeded)."""
    experts = 8
    rng = np.random.default_rng(12)
    shared = inputs(rng, 4096, SIZE)
    loudness = np.exp(0.3 * rng.normal(size=(experts, 1, SIZE))).astype(np.float32)
    shift = 0.3 * rng.normal(size=(experts, 1, SIZE)).astype(np.float32)
    rows = shared[: experts * 512].reshape(experts, 512, SIZE)
    seen, later = rows[:, :256] * loudness + shift, rows[:, 256:] * loudness + shift
    layer = np.stack([gram(x) / len(x) for x in seen]).mean(axis=0)
    own = np.stack([gram(x[:tokens]) / max(1, tokens) for x in seen])
    mixed = np.stack([shrunk(each, tokens, layer) for each in own]).astype(np.float32)
    weight = normal(13, (experts, OUT, SIZE))
    errors = {}
    for kind, hessian in [("own", own), ("shrunk", mixed)]:
        q, scale, _ = gptq(weight, hessian)
        errors[kind] = np.array(
            [output_error(weight[e], q[e], scale[e], GROUP, gram(later[e])) for e in range(experts)]
        )
    assert errors["shrunk"].sum() < errors["own"].sum()
    if tokens <= 8:
        assert (errors["shrunk"] < errors["own"]).all()
        assert errors["shrunk"].sum() < 0.7 * errors["own"].sum()
