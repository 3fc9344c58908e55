"""experts in numpy: a loop over tokens and slots, each through the `linear` oracle. Slow on purpose."""

from collections.abc import Callable

import numpy as np


def experts(
    x: np.ndarray,
    expert_ids: np.ndarray,
    weights: np.ndarray,
    project: Callable[[str, int, np.ndarray], np.ndarray],
    num_experts: int,
) -> np.ndarray:
    """x [tokens, embed], ids and weights [tokens, top_k] -> [tokens, embed] float32.

    Args:
        x: activations.
        expert_ids: local slots; those outside 0..num_experts-1 contribute nothing.
        weights: combine weights.
        project: (name, expert, rows) -> rows @ weight.T for name in gate, up, down.
        num_experts: local experts.
    """
    total = np.zeros(x.shape, np.float32)
    for token in range(x.shape[0]):
        row = x[token : token + 1].astype(np.float32)
        for slot in range(expert_ids.shape[1]):
            expert = int(expert_ids[token, slot])
            if not 0 <= expert < num_experts:
                continue
            gate, up = project("gate", expert, row), project("up", expert, row)
            hidden = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
            total[token] += np.float32(weights[token, slot]) * project("down", expert, hidden)[0]
    return total
