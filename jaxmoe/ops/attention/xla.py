"""attention in plain XLA: online softmax over blocks of pages, the trip count read from the positions.

The block partition depends on the page size and the table's width only, so a token's result does not depend on how its
prompt was chunked (up to the backend's choice of dot kernel). Scales are applied while INT8 data is widened, one block
at a time: a prefill has far more scores than key elements, so scaling scores and probabilities instead costs twice the
time.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.pages import KVPages

_BLOCK_KEYS = 256
_MASKED = -1e30


def _run(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    layer: jax.Array | int,
    scale: float,
) -> jax.Array:
    rows, chunk, heads, head_dim = q.shape
    kv_heads, page_size = pages.k.shape[-2], pages.page_size
    group = heads // kv_heads
    block_pages = min(max(1, _BLOCK_KEYS // page_size), page_table.shape[1])
    block_keys = block_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    # [rows, kv_heads, chunk * group, head_dim]: the heads that share keys become rows of one product.
    queries = (q.astype(jnp.float32) * scale).reshape(rows, chunk, kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, chunk * group, head_dim)
    limit = jnp.repeat(positions, group, axis=1)[:, None, :, None]

    longest = jnp.max(positions, axis=1)

    def take(data: jax.Array, data_scale: jax.Array | None, ids: jax.Array, seen: jax.Array) -> jax.Array:
        """[rows, block_keys, kv_heads, head_dim] float32 of this layer in key order; zero where a row has no key.

        Widening INT8 reads and writes every element anyway, so the scale and the guard ride along for nothing. The
        guard is a select: what an unwritten slot holds, NaN included, never reaches a product.
        """
        block = data[layer, ids].reshape(rows, block_keys, kv_heads, head_dim).astype(jnp.float32)
        if data_scale is not None:
            block = block * data_scale[layer, ids].reshape(rows, block_keys, kv_heads, 1)
        return jnp.where(seen[:, :, None, None], block, jnp.float32(0))

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        peak, total, out = carry
        ids = lax.dynamic_slice_in_dim(table, index * block_pages, block_pages, axis=1)
        key_position = index * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        seen = key_position[None, :] <= longest[:, None]
        keys, values = take(pages.k, pages.k_scale, ids, seen), take(pages.v, pages.v_scale, ids, seen)
        scores = jnp.einsum("rhqd,rkhd->rhqk", queries, keys, precision=lax.Precision.HIGHEST)
        visible = key_position[None, None, None, :] <= limit
        scores = jnp.where(visible, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        # A query that sees no key yet keeps the peak at the mask's value, where exp(0) = 1 must not count.
        probs = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), jnp.float32(0))
        decay = jnp.exp(peak - new_peak)
        total = total * decay + jnp.sum(probs, axis=-1)
        out = out * decay[..., None] + jnp.einsum("rhqk,rkhd->rhqd", probs, values, precision=lax.Precision.HIGHEST)
        return new_peak, total, out

    blocks = (jnp.max(positions) + block_keys) // block_keys
    shape = (rows, kv_heads, chunk * group)
    start = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    _, total, out = lax.fori_loop(0, blocks, body, start)
    # A padded query has total 0. The test is on the position: a total of NaN must reach the result, not become 0.
    real = limit[..., 0] >= 0
    out = jnp.where(real[..., None], out / jnp.where(real, total, 1)[..., None], jnp.float32(0))
    out = out.reshape(rows, kv_heads, chunk, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(rows, chunk, heads, head_dim).astype(q.dtype)


IMPL = Impl(name="xla", run=_run)
