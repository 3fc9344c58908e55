"""latent_attention in numpy float64, every key and value written out, one query and head at a time. Slow on purpose."""

import numpy as np

from jaxmoe.ops.attention.reference import cached, softmax


def latent_attention(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    latent: np.ndarray,
    rope: np.ndarray,
    page_table: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    sinks: np.ndarray | None = None,
    selected: np.ndarray | None = None,
) -> np.ndarray:
    """The result [rows, chunk, heads, v] in float64.

    Args:
        q_nope: [rows, chunk, heads, nope] part of the queries that does not rotate.
        q_rope: [rows, chunk, heads, rope] part that does.
        w_k: [heads, nope, lora] from latents to keys.
        w_v: [heads, v, lora] from latents to values.
        latent: [pages, page, 1, lora] dequantised latents of one layer.
        rope: [pages, page, 1, rope] dequantised rotated keys of one layer.
        page_table: [rows, table_width] pages of each sequence.
        positions: [rows, chunk], -1 for padding.
        scale: factor on the scores.
        sinks: [heads] logits in the denominators.
        selected: [rows, chunk, k] positions that each query sees, then -1; None: all up to its own.
    """
    out = np.zeros((*q_nope.shape[:3], w_v.shape[1]), np.float64)
    for row, chunk in np.ndindex(positions.shape):
        length = int(positions[row, chunk]) + 1
        if length == 0:
            continue
        seen = np.arange(length) if selected is None else selected[row, chunk][selected[row, chunk] >= 0]
        content = cached(latent, page_table[row], length)[seen, 0]
        turned = cached(rope, page_table[row], length)[seen, 0]
        for head in range(q_nope.shape[2]):
            keys = np.concatenate([content @ w_k[head].astype(np.float64).T, turned], axis=1)
            values = content @ w_v[head].astype(np.float64).T
            query = np.concatenate([q_nope[row, chunk, head], q_rope[row, chunk, head]]).astype(np.float64)
            out[row, chunk, head] = softmax(keys @ query * scale, None if sinks is None else sinks[head]) @ values
    return out
