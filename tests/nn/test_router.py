"""`choose_experts` against a float64 oracle in numpy, its rule for ties, and the router's own parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.errors import ConfigError
from jaxmoe.nn.config import RouterConfig
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.router import Router, choose_experts
from tests import tiny
from tests.tolerances import TOLERANCES

TOKENS, EXPERTS = 64, 16


def oracle(logits: np.ndarray, bias: np.ndarray | None, config: RouterConfig) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights, one token at a time in float64; equal scores go to the smaller id."""
    all_ids, all_weights = [], []
    for row in logits.astype(np.float64):
        if config.score == "logits":
            ids = sorted(range(config.experts), key=lambda expert: (-row[expert], expert))[: config.top_k]
            shares = np.exp(row[ids] - row[ids].max())
            all_ids.append(ids)
            all_weights.append(shares / shares.sum())
            continue
        if config.score == "softmax":
            scores = np.exp(row - row.max())
            scores /= scores.sum()
        else:
            scores = 1 / (1 + np.exp(-row))
        chosen_by = scores if bias is None else scores + bias.astype(np.float64)
        members = np.arange(config.experts).reshape(config.groups, -1)
        ranked_by = 2 if config.group_score == "top2" else 1
        group_scores = [np.sort(chosen_by[group])[-ranked_by:].sum() for group in members]
        kept = sorted(range(config.groups), key=lambda g: (-group_scores[g], g))[: config.topk_groups]
        allowed = [int(expert) for group in kept for expert in members[group]] if config.groups > 1 else range(len(row))
        ids = sorted(allowed, key=lambda expert: (-chosen_by[expert], expert))[: config.top_k]
        weights = scores[ids]
        if config.renormalize:
            weights = weights / max(weights.sum() + config.epsilon, config.least_sum)
        all_ids.append(ids)
        all_weights.append(weights * config.scaling)
    return np.array(all_ids), np.array(all_weights)


def check(logits: np.ndarray, bias: np.ndarray | None, config: RouterConfig) -> np.ndarray:
    """Compares ids exactly and weights closely; returns the ids."""
    device_bias = None if bias is None else jnp.asarray(bias)
    ids, weights = jax.jit(lambda x, b: choose_experts(x, b, config))(jnp.asarray(logits), device_bias)
    expected_ids, expected_weights = oracle(logits, bias, config)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=TOLERANCES["router_weights"].value)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    return np.asarray(ids)


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((TOKENS, EXPERTS)).astype(np.float32), rng.normal(0, 0.3, EXPERTS).astype(np.float32)


@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equals_oracle(score: Any, renormalize: bool, scaling: float) -> None:
    logits, _ = draw(0)
    config = RouterConfig(experts=EXPERTS, top_k=4, score=score, renormalize=renormalize, scaling=scaling)
    check(logits, None, config)


@pytest.mark.parametrize(("groups", "topk_groups"), [(1, 1), (2, 1), (4, 2), (8, 8)])
def test_biased_choice_within_groups_equals_oracle(groups: int, topk_groups: int) -> None:
    logits, bias = draw(1)
    config = RouterConfig(
        experts=EXPERTS,
        top_k=4,
        score="sigmoid",
        correction_bias=True,
        groups=groups,
        topk_groups=topk_groups,
        epsilon=1e-20,
        scaling=2.5,
    )
    ids = check(logits, bias, config)
    used = {tuple(sorted(set(row // (EXPERTS // groups)))) for row in ids}
    assert max(map(len, used)) <= topk_groups


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    logits, bias = draw(2)
    config = RouterConfig(experts=EXPERTS, top_k=3, score="sigmoid", correction_bias=True, renormalize=False)
    biased, plain = check(logits, bias, config), check(logits, None, config)
    assert (biased != plain).any()
    ids, weights = choose_experts(jnp.asarray(logits), jnp.asarray(bias), config)
    np.testing.assert_array_equal(weights, jax.nn.sigmoid(jnp.take_along_axis(jnp.asarray(logits), ids, axis=-1)))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_of_equal_scores_the_smaller_id_wins(score: Any, groups: int) -> None:
    config = RouterConfig(experts=8, top_k=3, score=score, groups=groups, topk_groups=min(groups, 2))
    ids = check(np.zeros((2, 8), np.float32), None, config)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    # Few distinct values: ties inside and between groups, in every place.
    logits = np.random.default_rng(3).integers(0, 2, (TOKENS, 8)).astype(np.float32)
    check(logits, None, config)


def test_a_large_bias_leaves_the_choice_to_the_scores() -> None:
    """Released biases lie around 7 with a spread of 0.06: float32 still ranks score + bias like float64."""
    rng = np.random.default_rng(11)
    logits = rng.standard_normal((TOKENS, 128)).astype(np.float32)
    bias = (7 + rng.normal(0, 0.06, 128)).astype(np.float32)
    config = RouterConfig(experts=128, top_k=8, score="sigmoid", correction_bias=True, epsilon=1e-20, scaling=2.5)
    check(logits, bias, config)
    # In bfloat16, where neighbours of 7 are 1/32 apart, the same sum ranks otherwise.
    coarse = (jax.nn.sigmoid(jnp.asarray(logits)) + jnp.asarray(bias)[None, :]).astype(jnp.bfloat16)
    assert (np.asarray(jax.lax.top_k(coarse, 8)[1]) != oracle(logits, bias, config)[0]).any()


def test_renormalized_weights_sum_to_the_scaling() -> None:
    logits, bias = draw(4)
    config = RouterConfig(
        experts=EXPERTS, top_k=4, score="sigmoid", correction_bias=True, epsilon=1e-20, scaling=float(4)
    )
    _, weights = choose_experts(jnp.asarray(logits), jnp.asarray(bias), config)
    np.testing.assert_allclose(weights.sum(-1), 4, rtol=TOLERANCES["router_weights"].value)


@pytest.mark.parametrize("top_k", [1, 4, EXPERTS])
def test_softmax_over_the_chosen_logits_alone(top_k: int) -> None:
    """gpt_oss: the others take no part, so that weights sum to 1 without renormalisation."""
    logits, _ = draw(5)
    config = RouterConfig(experts=EXPERTS, top_k=top_k, score="logits", renormalize=False)
    check(logits, None, config)
    _, weights = choose_experts(jnp.asarray(logits), None, config)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=TOLERANCES["router_weights"].value)
    if top_k == 1:
        assert (weights == 1).all()


def test_of_equal_logits_the_smaller_id_wins() -> None:
    config = RouterConfig(experts=8, top_k=3, score="logits", renormalize=False)
    np.testing.assert_array_equal(check(np.zeros((2, 8), np.float32), None, config), [[0, 1, 2]] * 2)
    check(np.random.default_rng(3).integers(0, 2, (TOKENS, 8)).astype(np.float32), None, config)


def test_large_logits_do_not_overflow() -> None:
    """The shift of all logits by the same amount changes nothing."""
    logits, config = draw(6)[0], RouterConfig(experts=EXPERTS, top_k=4, score="logits", renormalize=False)
    check(logits + np.float32(2**12), None, config)
    _, weights = choose_experts(jnp.asarray(1e30 * logits), None, config)
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0]] * TOKENS)


@pytest.mark.parametrize(("groups", "topk_groups"), [(2, 1), (4, 2), (8, 3), (16, 5)])
def test_groups_ranked_by_their_best_equal_oracle(groups: int, topk_groups: int) -> None:
    """deepseek_v2; groups of a single expert have no second best."""
    logits, _ = draw(7)
    options: dict[str, Any] = {"score": "softmax", "renormalize": False, "scaling": 16.0, "group_score": "max"}
    config = RouterConfig(experts=EXPERTS, top_k=4, groups=groups, topk_groups=topk_groups, **options)
    ids = check(logits, None, config)
    if groups < EXPERTS:
        by_two = check(logits, None, dataclasses.replace(config, group_score="top2"))
        assert (ids != by_two).any(), "both ranks choose alike: the case shows nothing"


def test_of_equal_groups_the_lower_wins() -> None:
    config = RouterConfig(experts=8, top_k=3, score="softmax", groups=4, topk_groups=2, group_score="max")
    np.testing.assert_array_equal(check(np.zeros((2, 8), np.float32), None, config), [[0, 1, 2]] * 2)
    check(np.random.default_rng(3).integers(0, 2, (TOKENS, 8)).astype(np.float32), None, config)


def test_the_divisor_has_a_least_value() -> None:
    """ernie4_5_moe: scores that nearly vanish are not blown up to a sum of 1; others do not notice."""
    logits, _ = draw(8)
    config = RouterConfig(experts=EXPERTS, top_k=4, score="sigmoid", least_sum=1e-12)
    check(logits - 40, None, config)
    _, small = choose_experts(jnp.asarray(logits - 40), None, config)
    assert (small.sum(-1) < 0.1).all()
    plain = choose_experts(jnp.asarray(logits), None, dataclasses.replace(config, least_sum=0.0))[1]
    np.testing.assert_array_equal(choose_experts(jnp.asarray(logits), None, config)[1], plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", ["correction", "logits"])
def test_a_router_has_its_own_parameters_in_each_layer_in_float32(kind: str, layer: int, dtype: jnp.dtype) -> None:
    """x may be bfloat16; the product, its bias and the correction are float32, or close scores would change places."""
    if kind == "correction":
        config = RouterConfig(experts=EXPERTS, top_k=4, score="sigmoid", correction_bias=True)
    else:
        config = RouterConfig(experts=EXPERTS, top_k=4, score="logits", logit_bias=True, renormalize=False)
    decoder = tiny.manifest_of(tiny.CONFIGS["glm4_moe"]).config
    decoder = dataclasses.replace(decoder, moe=dataclasses.replace(decoder.moe, router=config))
    router, generator = Router(decoder, ParamFactory(layers=2)), np.random.default_rng(9)
    drawn = {}
    for path, variable in nnx.to_flat_state(nnx.state(router)):
        assert variable.get_metadata()["float32"]
        name = str(path[0])
        drawn[name] = generator.normal(0, 0.3, size=variable.get_value().shape).astype(np.float32)
        getattr(router, name)[...] = jnp.asarray(drawn[name])
    assert set(drawn) == {"weight", "bias" if kind == "correction" else "logit_bias"}
    x = generator.normal(size=(TOKENS, decoder.embed)).astype(dtype)
    ids, weights = router(jnp.asarray(x), layer)
    logits = x.astype(np.float64) @ drawn["weight"][layer].astype(np.float64).T
    bias = drawn["bias"][layer] if kind == "correction" else None
    if kind == "logits":
        logits = logits + drawn["logit_bias"][layer]
    expected_ids, expected_weights = oracle(logits, bias, config)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=TOLERANCES["router_product"].value)


@pytest.mark.parametrize("change", [{"scaling": 2.0}, {"groups": 2}, {"correction_bias": True}, {"renormalize": True}])
def test_what_top_logits_would_ignore_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="softmax to its top logits"):
        RouterConfig(**{"experts": 8, "top_k": 2, "score": "logits", "renormalize": False, **change})
