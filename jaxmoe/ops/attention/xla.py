"""attention in plain XLA: online softmax over blocks of pages, the trip count read from the positions.

The block partition depends on the page size and the table's width only, so a token's result does not depend on how its
prompt was chunked (up to the backend's choice of dot kernel). Scales are applied while INT8 data is widened, one block
at a time: a prefill has far more scores than key elements, so scaling scores and probabilities instead costs twice the
time.
"""

import jax
import jax.numpy as jnp

from jaxmoe.ops.attention.blocks import PageBlocks, attend, read_pages
from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.pages import Table


def _run(
    q: jax.Array,
    k: Table,
    v: Table,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    layer: jax.Array | int,
    scale: float,
    window: jax.Array | int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    rows, chunk, heads, head_dim = q.shape
    kv_heads = k.data.shape[-2]
    group = heads // kv_heads
    # [rows, kv_heads, chunk * group, head_dim]: the heads that share keys become rows of one product.
    queries = (q.astype(jnp.float32) * scale).reshape(rows, chunk, kv_heads, group, head_dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, chunk * group, head_dim)
    blocks = PageBlocks(page_table, positions, k.page_size, window)

    def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        ids, seen, visible = blocks.block(index)
        keys, values = read_pages(k, ids, seen, layer=layer), read_pages(v, ids, seen, layer=layer)
        return keys, values, jnp.repeat(visible, group, axis=2)

    if sinks is not None:
        by_head = sinks.astype(jnp.float32).reshape(kv_heads, 1, group)
        sinks = jnp.broadcast_to(by_head, (kv_heads, chunk, group)).reshape(kv_heads, chunk * group)
    out = attend(
        queries,
        read,
        start=blocks.start,
        stop=blocks.stop,
        v_width=head_dim,
        real=jnp.repeat(positions, group, axis=1) >= 0,
        sinks=sinks,
    )
    out = out.reshape(rows, kv_heads, chunk, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(rows, chunk, heads, head_dim).astype(q.dtype)


IMPL = Impl(name="xla", run=_run)
