"""index_select in numpy float64, one query and key at a time. Slow on purpose."""

import numpy as np

from jaxmoe.ops.attention.reference import cached


def scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[keys] float64 scores of one query: q [heads, width], weights [heads], keys [keys, width]."""
    q, weights = q.astype(np.float64), weights.astype(np.float64)
    return np.array([sum(weights[head] * max(q[head] @ key, 0.0) for head in range(len(q))) for key in keys])


def index_select(
    q: np.ndarray,
    weights: np.ndarray,
    index: np.ndarray,
    page_table: np.ndarray,
    positions: np.ndarray,
    *,
    top_k: int,
) -> np.ndarray:
    """[rows, chunk, min(top_k, capacity)] int32: chosen positions, ascending, then -1.

    Args:
        q: [rows, chunk, heads, width] index queries.
        weights: [rows, chunk, heads] of the heads.
        index: [pages, page, 1, width] dequantised index keys of one layer.
        page_table: [rows, table_width] pages of each sequence.
        positions: [rows, chunk], -1 for padding.
        top_k: keys to choose; of equal scores the lower position.
    """
    out = np.full((*positions.shape, min(top_k, page_table.shape[1] * index.shape[1])), -1, np.int32)
    for row, chunk in np.ndindex(positions.shape):
        length = int(positions[row, chunk]) + 1
        of_key = scores(q[row, chunk], weights[row, chunk], cached(index, page_table[row], length)[:, 0])
        best = sorted(range(length), key=lambda position: (-of_key[position], position))[:top_k]
        out[row, chunk, : len(best)] = sorted(best)
    return out
