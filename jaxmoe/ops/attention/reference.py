"""attention in numpy float64 over a dequantised cache, one query and head at a time. Slow on purpose."""

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    page_table: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """q [rows, chunk, heads, head_dim], k and v [pages, page, kv_heads, head_dim] float -> float64 like q.

    Args:
        q: queries.
        k: dequantised keys of one layer.
        v: dequantised values of one layer.
        page_table: [rows, table_width] pages of each sequence.
        positions: [rows, chunk], -1 for padding.
        scale: factor on the scores.
    """
    out = np.zeros(q.shape, np.float64)
    group = q.shape[2] // k.shape[2]
    for row, chunk in np.ndindex(positions.shape):
        length = int(positions[row, chunk]) + 1
        if length == 0:
            continue
        keys = np.concatenate([k[page] for page in page_table[row]])[:length].astype(np.float64)
        values = np.concatenate([v[page] for page in page_table[row]])[:length].astype(np.float64)
        for head in range(q.shape[2]):
            scores = keys[:, head // group] @ q[row, chunk, head].astype(np.float64) * scale
            probs = np.exp(scores - scores.max())
            out[row, chunk, head] = probs / probs.sum() @ values[:, head // group]
    return out
