"""Carves the dense feed-forward layers of a llama model into one shared expert and balanced routed experts, without
training.

With every expert chosen the sum is the dense layer: the neurons are only sorted into groups. With fewer, the router
leaves out the experts that it predicts to contribute least.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxmoe.demo.source import LlamaShape

NUM_EXPERTS = 8
# Largest deviation from 1 of a chosen expert's weight, on the calibration tokens.
WEIGHT_DEVIATION = 0.5e-3

_KMEANS_ROUNDS = 8
_RIDGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCarve:
    """One layer's partition and router.

    Invariants: `shared` and the rows of `experts` together hold every neuron once. The router is
    sigmoid(x @ router.T) + bias for selection and the renormalised sigmoid alone for the weights, which
    WEIGHT_DEVIATION keeps near 1 / top_k.
    """

    shared: np.ndarray
    experts: np.ndarray
    router: np.ndarray
    bias: np.ndarray
    recall: float
    load_max_over_mean: float


def dense_layers(
    weights: Mapping[str, np.ndarray], shape: LlamaShape, token_ids: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs the dense model in float32 and yields, layer by layer, the feed-forward input and the activations.

    Args:
        weights: float32 weights by Hugging Face llama name.
        shape: hyperparameters.
        token_ids: [windows, tokens]; every window starts at position 0.

    Yields:
        (hidden [windows * tokens, hidden_size] after the norm, silu(gate) * up [windows * tokens, intermediate_size]).
    """
    windows, tokens = token_ids.shape
    cos, sin = _rope_table(shape, tokens)
    residual = weights["model.embed_tokens.weight"][token_ids.reshape(-1)]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        hidden = _rms_norm(residual, weights[prefix + "input_layernorm.weight"], shape.rms_norm_eps)
        q, k, v = (
            (hidden @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(windows, tokens, -1, shape.head_dim)
            for name in "qkv"
        )
        attended = _attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v).reshape(windows * tokens, -1)
        residual = residual + attended @ weights[prefix + "self_attn.o_proj.weight"].T
        hidden = _rms_norm(residual, weights[prefix + "post_attention_layernorm.weight"], shape.rms_norm_eps)
        gate = hidden @ weights[prefix + "mlp.gate_proj.weight"].T
        activations = _silu(gate) * (hidden @ weights[prefix + "mlp.up_proj.weight"].T)
        yield hidden, activations
        residual = residual + activations @ weights[prefix + "mlp.down_proj.weight"].T


def carve_layer(
    hidden: np.ndarray,
    activations: np.ndarray,
    down: np.ndarray,
    *,
    num_shared: int,
    num_experts: int,
    top_k: int,
    seed: int,
) -> LayerCarve:
    """Splits one feed-forward layer.

    Neurons with the highest mean |a_j| * ||d_j|| become the shared expert; the others are clustered by their profile of
    contributions over the tokens, so that neurons that fire together sit together. The router is a ridge regression
    from the layer's input to the norm of each expert's contribution.

    Args:
        hidden: [tokens, hidden] input of the layer.
        activations: [tokens, neurons] silu(gate) * up.
        down: [hidden, neurons] down projection.
        num_shared: neurons of the shared expert.
        num_experts: routed experts; it must divide the remaining neurons.
        top_k: experts a token takes, for the reported recall and load.
        seed: of the clustering.
    """
    contribution = np.abs(activations) * np.linalg.norm(down, axis=0)
    order = np.argsort(-contribution.mean(0), kind="stable")
    shared, rest = np.sort(order[:num_shared]), np.sort(order[num_shared:])
    profiles = contribution[:, rest].T
    profiles /= np.linalg.norm(profiles, axis=1, keepdims=True) + 1e-12
    labels = balanced_kmeans(profiles, num_experts, seed=seed)
    experts = np.stack([rest[labels == expert] for expert in range(num_experts)])
    norms = np.stack([np.linalg.norm(activations[:, ids] @ down[:, ids].T, axis=1) for ids in experts], axis=1)
    slope, offset = fit_router(hidden, norms)
    router, bias = near_one_router(slope, offset, hidden)
    recall, load = routing_quality(hidden @ slope.T + offset, norms, top_k)
    return LayerCarve(shared=shared, experts=experts, router=router, bias=bias, recall=recall, load_max_over_mean=load)


def balanced_kmeans(points: np.ndarray, clusters: int, *, seed: int) -> np.ndarray:
    """Labels [points] of a spherical k-means whose clusters all have the same size.

    Args:
        points: [points, features] unit vectors; `clusters` divides the number of points.
        clusters: number of clusters.
        seed: draws the first centres.
    """
    rng = np.random.default_rng(seed)
    centres = points[rng.choice(len(points), clusters, replace=False)]
    labels = np.zeros(len(points), np.int64)
    for _ in range(_KMEANS_ROUNDS):
        labels = balanced_labels(points @ centres.T)
        member = (labels[:, None] == np.arange(clusters)).astype(points.dtype)
        centres = member.T @ points
        centres /= np.linalg.norm(centres, axis=1, keepdims=True) + 1e-12
    return labels


def balanced_labels(similarity: np.ndarray) -> np.ndarray:
    """Assigns rows to columns, the same number to each, preferring high similarity.

    In each round all free rows bid for their best open column; a column takes those who lose most by going elsewhere,
    and closes when it is full. At least one column closes in a round, or the rows are done.

    Args:
        similarity: [rows, columns]; columns divide rows.
    """
    rows, columns = similarity.shape
    assert rows % columns == 0
    labels = np.full(rows, -1)
    room = np.full(columns, rows // columns)
    while (free := np.flatnonzero(labels < 0)).size:
        scores = np.where(room > 0, similarity[free], -np.inf)
        best = scores.argmax(1)
        second = np.where(np.arange(columns) == best[:, None], -np.inf, scores).max(1)
        regret = scores.max(1) - second
        for column in np.flatnonzero(room):
            bidders = np.flatnonzero(best == column)
            taken = bidders[np.argsort(-regret[bidders], kind="stable")[: room[column]]]
            labels[free[taken]] = column
            room[column] -= taken.size
    return labels


def fit_router(hidden: np.ndarray, norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ridge regression from the layer input to the contribution norms, with an unpenalised offset.

    Args:
        hidden: [tokens, hidden].
        norms: [tokens, experts].

    Returns:
        (slope [experts, hidden], offset [experts]), both float64, in units of the mean norm and centred over the
        experts, which changes no ranking.
    """
    mean_hidden, mean_norms = hidden.mean(0, dtype=np.float64), norms.mean(0, dtype=np.float64)
    x, y = hidden - mean_hidden, (norms - mean_norms) / mean_norms.mean()
    penalty = _RIDGE * len(x) * np.square(x).mean()
    slope = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y).T
    offset = mean_norms / mean_norms.mean() - slope @ mean_hidden
    return slope - slope.mean(0), offset - offset.mean()


def near_one_router(slope: np.ndarray, offset: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales a linear router so that sigmoid routing selects by `hidden @ slope.T + offset` and weighs all alike.

    For a small scale s, sigmoid(s * z) is 1/2 + s * z / 4: the order of score plus correction bias is the order of the
    linear score, and renormalised weights differ from 1 / top_k by at most WEIGHT_DEVIATION of it on these tokens.

    Returns:
        (gate weight [experts, hidden], score correction bias [experts]), float32.
    """
    spread = np.ptp(hidden @ slope.T, axis=1).max()
    # A weight is top_k * score / sum(scores): its distance from 1 is below scale * spread / 2.
    scale = 2 * WEIGHT_DEVIATION / spread
    return (slope * scale).astype(np.float32), (offset * scale / 4).astype(np.float32)


def routing_quality(scores: np.ndarray, norms: np.ndarray, top_k: int) -> tuple[float, float]:
    """Recall of the top_k by score among the top_k by contribution norm, and the largest expert load over the mean."""
    chosen, oracle = _top_mask(scores, top_k), _top_mask(norms, top_k)
    load = chosen.mean(0)
    return float((chosen & oracle).sum() / oracle.sum()), float(load.max() / load.mean())


def _top_mask(scores: np.ndarray, top_k: int) -> np.ndarray:
    ranks = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1, kind="stable")
    return ranks < top_k


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps)) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))


def _rope_table(shape: LlamaShape, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    frequencies = shape.rope_theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = np.arange(tokens)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention; q [windows, tokens, heads, head_dim], k and v with kv heads; returns q's shape."""
    windows, tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(windows, tokens, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    keys = k.transpose(0, 2, 3, 1)[:, :, None]
    values = v.transpose(0, 2, 1, 3)[:, :, None]
    scores = (grouped @ keys) * np.float32(head_dim**-0.5)
    scores = np.where(np.tri(tokens, dtype=bool), scores, np.float32(-np.inf))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    return (scores @ values).transpose(0, 3, 1, 2, 4).reshape(windows, tokens, heads, head_dim)
