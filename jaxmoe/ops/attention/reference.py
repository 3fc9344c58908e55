"""attention in numpy float64 over a dequantised cache, one query and head at a time. Slow on purpose."""

import numpy as np


def cached(table: np.ndarray, page_ids: np.ndarray, length: int) -> np.ndarray:
    """[length, heads, width] float64: the first vectors of a sequence.

    Args:
        table: [pages, page, heads, width] dequantised vectors of one layer.
        page_ids: [table_width] the sequence's pages in order.
        length: tokens.
    """
    return np.concatenate([table[page] for page in page_ids])[:length].astype(np.float64)


def softmax(scores: np.ndarray, sink: float | None) -> np.ndarray:
    """Probabilities of one query's scores; a sink takes its part and has no place in the result."""
    logits = scores if sink is None else np.append(scores, sink)
    parts = np.exp(logits - logits.max())
    return (parts / parts.sum())[: len(scores)]


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    page_table: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    window: int = 0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """q [rows, chunk, heads, head_dim], k and v [pages, page, kv_heads, head_dim] float -> float64 like q.

    Args:
        q: queries.
        k: dequantised keys of one layer.
        v: dequantised values of one layer.
        page_table: [rows, table_width] pages of each sequence.
        positions: [rows, chunk], -1 for padding.
        scale: factor on the scores.
        window: keys that a query sees, its own included; 0: all.
        sinks: [heads] logits in the denominators.
    """
    out = np.zeros(q.shape, np.float64)
    group = q.shape[2] // k.shape[2]
    for row, chunk in np.ndindex(positions.shape):
        length = int(positions[row, chunk]) + 1
        if length == 0:
            continue
        first = max(0, length - window) if window else 0
        keys = cached(k, page_table[row], length)[first:]
        values = cached(v, page_table[row], length)[first:]
        for head in range(q.shape[2]):
            scores = keys[:, head // group] @ q[row, chunk, head].astype(np.float64) * scale
            probs = softmax(scores, None if sinks is None else float(sinks[head]))
            out[row, chunk, head] = probs @ values[:, head // group]
    return out
