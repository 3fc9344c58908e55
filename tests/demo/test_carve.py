"""Carving on small synthetic layers: the partition, its balance, and a router that finds the experts that matter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.demo.carve import (
    WEIGHT_DEVIATION,
    LayerCarve,
    balanced_kmeans,
    balanced_labels,
    carve_layer,
    dense_layers,
    fit_router,
    near_one_router,
    routing_quality,
)
from jaxmoe.demo.source import LlamaShape, hf_name, unpermute_rope_rows

TOKENS, HIDDEN, SHARED, EXPERTS, EXPERT_NEURONS = 512, 16, 24, 4, 8
NEURONS = SHARED + EXPERTS * EXPERT_NEURONS


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def grouped_layer() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A layer whose routed neurons fire in groups, each group on one direction of the input.

    Returns (hidden, activations, down, group of each neuron; -1 marks the strong neurons that always fire).
    """
    group = np.random.default_rng(0).permutation(
        np.repeat(np.arange(-1, EXPERTS), [SHARED] + [EXPERT_NEURONS] * EXPERTS)
    )
    hidden = random(TOKENS, HIDDEN, seed=1)
    drive = np.maximum(hidden[:, :EXPERTS], 0)
    activations = np.where(group < 0, np.float32(20), drive[:, np.maximum(group, 0)])
    noise = 1 + 0.1 * random(TOKENS, NEURONS, seed=2)
    return hidden, activations * noise, random(HIDDEN, NEURONS, seed=3), group


def carve(seed: int = 0, top_k: int = 2) -> LayerCarve:
    hidden, activations, down, _ = grouped_layer()
    return carve_layer(hidden, activations, down, num_shared=SHARED, num_experts=EXPERTS, top_k=top_k, seed=seed)


def route(carved: LayerCarve, hidden: np.ndarray, top_k: int) -> np.ndarray:
    """Weights [tokens, experts] of the glm4_moe router with routed_scaling_factor = top_k; 0 where not chosen."""
    scores = 1 / (1 + np.exp(-(hidden @ carved.router.T)))
    order = np.argsort(-(scores + carved.bias), axis=1)
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order[:, :top_k], True, axis=1)
    kept = np.where(chosen, scores, 0)
    return kept / kept.sum(1, keepdims=True) * top_k


def test_every_neuron_has_one_place() -> None:
    carved = carve()
    assert carved.experts.shape == (EXPERTS, EXPERT_NEURONS)
    assert sorted([*carved.shared, *carved.experts.ravel()]) == list(range(NEURONS))


def test_strong_neurons_are_shared_and_groups_become_experts() -> None:
    group, carved = grouped_layer()[3], carve()
    assert (group[carved.shared] == -1).all()
    assert sorted(tuple(set(group[ids])) for ids in carved.experts) == [(0,), (1,), (2,), (3,)]


def test_carving_is_deterministic() -> None:
    first, second = carve(seed=3), carve(seed=3)
    for name in ("shared", "experts", "router", "bias"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_router_recall_beats_chance_and_load_is_bounded() -> None:
    carved = carve(top_k=2)
    assert carved.recall > 0.75  # chance is 2 of 4
    assert 1 <= carved.load_max_over_mean < 1.5


def test_all_experts_together_are_the_dense_layer() -> None:
    hidden, activations, down, _ = grouped_layer()
    carved = carve(top_k=EXPERTS)
    weights = route(carved, hidden, EXPERTS)
    total = activations[:, carved.shared] @ down[:, carved.shared].T
    for expert, ids in enumerate(carved.experts):
        total += weights[:, expert, None] * (activations[:, ids] @ down[:, ids].T)
    dense = activations @ down.T
    np.testing.assert_allclose(total, dense, atol=2 * WEIGHT_DEVIATION * np.abs(dense).max())


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_sigmoid_router_selects_by_the_regression_and_weighs_alike(top_k: int) -> None:
    hidden = random(TOKENS, HIDDEN, seed=5)
    norms = np.abs(hidden @ random(HIDDEN, EXPERTS, seed=6)) + random(EXPERTS, seed=7) ** 2
    slope, offset = fit_router(hidden, norms)
    router, bias = near_one_router(slope, offset, hidden)
    carved = LayerCarve(
        shared=np.arange(0), experts=np.arange(0), router=router, bias=bias, recall=0.0, load_max_over_mean=0.0
    )
    weights = route(carved, hidden, top_k)
    linear = hidden @ slope.T + offset
    ranks = np.argsort(np.argsort(-linear, axis=1), axis=1)
    assert ((weights > 0) == (ranks < top_k)).mean() > 0.999
    assert np.abs(weights[weights > 0] - 1).max() <= WEIGHT_DEVIATION


@given(columns=st.integers(1, 6), size=st.integers(1, 9), seed=st.integers(0, 99))
def test_labels_are_balanced(columns: int, size: int, seed: int) -> None:
    labels = balanced_labels(random(columns * size, columns, seed=seed))
    assert np.bincount(labels, minlength=columns).tolist() == [size] * columns


def test_labels_take_the_best_column_where_there_is_room() -> None:
    similarity = np.array([[3.0, 1.0], [9.0, 0.0], [0.0, 2.0], [5.0, 4.5]])
    assert balanced_labels(similarity).tolist() == [0, 0, 1, 1]


def test_kmeans_finds_separate_clusters_of_one_size() -> None:
    truth = np.random.default_rng(0).permutation(np.repeat(np.arange(3), 20))
    points = np.eye(3, 10)[truth] + 0.05 * random(60, 10, seed=4)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    labels = balanced_kmeans(points, 3, seed=1)
    assert len(set(zip(truth.tolist(), labels.tolist(), strict=True))) == 3


def test_routing_quality_of_a_perfect_and_of_the_opposite_router() -> None:
    norms = np.tile(np.arange(4.0), (10, 1))
    assert routing_quality(norms, norms, 2) == (1.0, 2.0)
    assert routing_quality(-norms, norms, 2) == (0.0, 2.0)


def tiny_llama(seed: int) -> tuple[LlamaShape, dict[str, np.ndarray]]:
    shape = LlamaShape(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position_tokens=64,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
    )
    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 16}
    weights = {"model.embed_tokens.weight": random(32, 16, seed=seed)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + 0.1 * random(16, seed=seed + 1)
        for name, count in rows.items():
            weights[f"{prefix}self_attn.{name}.weight"] = random(count, 16, seed=seed + layer + count)
        weights[f"{prefix}mlp.gate_proj.weight"] = random(24, 16, seed=seed + 2)
        weights[f"{prefix}mlp.up_proj.weight"] = random(24, 16, seed=seed + 3)
        weights[f"{prefix}mlp.down_proj.weight"] = random(16, 24, seed=seed + 4)
    return shape, weights


def test_dense_forward_is_causal_and_windows_are_independent() -> None:
    shape, weights = tiny_llama(seed=0)
    ids = np.random.default_rng(1).integers(0, 32, size=(2, 10))
    changed = ids.copy()
    changed[0, 6:] = (changed[0, 6:] + 1) % 32
    for (before, _), (after, _) in zip(
        dense_layers(weights, shape, ids), dense_layers(weights, shape, changed), strict=True
    ):
        before, after = before.reshape(2, 10, -1), after.reshape(2, 10, -1)
        np.testing.assert_allclose(before[0, :6], after[0, :6], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(before[1], after[1], rtol=1e-4, atol=1e-5)
        assert np.abs(before[0, 6:] - after[0, 6:]).max() > 0.1


def test_dense_forward_yields_each_layers_input_and_activations() -> None:
    shape, weights = tiny_llama(seed=0)
    layers = list(dense_layers(weights, shape, np.arange(12).reshape(2, 6)))
    assert [(hidden.shape, activations.shape) for hidden, activations in layers] == [((12, 16), (12, 24))] * 2
    hidden, activations = layers[0]
    gate = hidden @ weights["model.layers.0.mlp.gate_proj.weight"].T
    expected = gate / (1 + np.exp(-gate)) * (hidden @ weights["model.layers.0.mlp.up_proj.weight"].T)
    np.testing.assert_allclose(activations, expected, rtol=1e-4, atol=1e-5)
    assert activations.dtype == np.float32


def test_rope_rows_return_to_halves() -> None:
    weight = np.arange(16.0).reshape(8, 2)  # 2 heads of 4 rows: pairs (0, 1), (2, 3) become halves (0, 2), (1, 3)
    assert unpermute_rope_rows(weight, 2)[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]


def test_gguf_names() -> None:
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output.weight") is None
    assert hf_name("blk.0.attn_q.bias") is None
