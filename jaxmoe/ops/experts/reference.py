"""experts in numpy: a loop over tokens and slots, each through the `linear` oracle. Slow on purpose."""

from collections.abc import Callable, Mapping

import numpy as np


def experts(
    x: np.ndarray,
    expert_ids: np.ndarray,
    weights: np.ndarray,
    project: Callable[[str, int, np.ndarray], np.ndarray],
    num_experts: int,
    *,
    kind: str = "swiglu",
    limit: float | None = None,
    biases: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """x [tokens, embed], ids and weights [tokens, top_k] -> [tokens, embed] float32.

    Args:
        x: activations.
        expert_ids: local slots; those outside 0..num_experts-1 contribute nothing.
        weights: combine weights.
        project: (name, expert, rows) -> rows @ weight.T for name in gate, up, down.
        num_experts: local experts.
        kind: 'swiglu' or 'gpt_oss'.
        limit: clamp of gate and up.
        biases: [experts, width] for gate, up, down.
    """

    def add_bias(name: str, expert: int, rows: np.ndarray) -> np.ndarray:
        return rows if biases is None else rows + biases[name][expert].astype(np.float32)

    total = np.zeros(x.shape, np.float32)
    for token in range(x.shape[0]):
        row = x[token : token + 1].astype(np.float32)
        for slot in range(expert_ids.shape[1]):
            expert = int(expert_ids[token, slot])
            if not 0 <= expert < num_experts:
                continue
            gate, up = (add_bias(name, expert, project(name, expert, row)) for name in ("gate", "up"))
            hidden = activate(gate, up, kind, limit)
            total[token] += (
                np.float32(weights[token, slot]) * add_bias("down", expert, project("down", expert, hidden))[0]
            )
    return total


def activate(gate: np.ndarray, up: np.ndarray, kind: str, limit: float | None) -> np.ndarray:
    """The hidden row in float32; comparisons are written so that a NaN stays."""
    if limit is not None:
        gate = np.where(gate > limit, np.float32(limit), gate)
        up = np.where(up > limit, np.float32(limit), np.where(up < -limit, np.float32(-limit), up))
    if kind == "gpt_oss":
        return ((up + 1) * gate / (1 + np.exp(np.float32(-1.702) * gate))).astype(np.float32)
    assert kind == "swiglu", kind
    return (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
