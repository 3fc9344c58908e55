"""`choose_experts` against a float64 oracle in numpy, and its rule for ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.nn.config import RouterConfig
from jaxmoe.nn.router import choose_experts
from tests.tolerances import TOLERANCES

TOKENS, EXPERTS = 64, 16


def oracle(logits: np.ndarray, bias: np.ndarray | None, config: RouterConfig) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights, one token at a time in float64; equal scores go to the smaller id."""
    all_ids, all_weights = [], []
    for row in logits.astype(np.float64):
        if config.score == "softmax":
            scores = np.exp(row - row.max())
            scores /= scores.sum()
        else:
            scores = 1 / (1 + np.exp(-row))
        chosen_by = scores if bias is None else scores + bias.astype(np.float64)
        members = np.arange(config.experts).reshape(config.groups, -1)
        group_scores = [np.sort(chosen_by[group])[-2:].sum() for group in members]
        kept = sorted(range(config.groups), key=lambda g: (-group_scores[g], g))[: config.topk_groups]
        allowed = [int(expert) for group in kept for expert in members[group]] if config.groups > 1 else range(len(row))
        ids = sorted(allowed, key=lambda expert: (-chosen_by[expert], expert))[: config.top_k]
        weights = scores[ids]
        if config.renormalize:
            weights = weights / (weights.sum() + config.epsilon)
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
def test_equals_oracle(score: str, renormalize: bool, scaling: float) -> None:
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
def test_of_equal_scores_the_smaller_id_wins(score: str, groups: int) -> None:
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
