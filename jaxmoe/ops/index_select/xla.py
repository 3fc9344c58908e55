"""index_select in plain XLA: block by block up to the longest sequence, the best so far against the block's scores.

Neither time nor memory follow the length that a page table could hold.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.ops.attention.blocks import PageBlocks, read_pages
from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.pages import Table

BLOCK_INDEX_KEYS = 1024
"""Keys of a block: the best so far are sorted against each, so a block is not small beside what may be chosen."""


def _run(
    q: jax.Array,
    weights: jax.Array,
    index: Table,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    layer: jax.Array | int,
    top_k: int,
) -> jax.Array:
    rows, chunk = positions.shape
    blocks = PageBlocks(page_table, positions, index.page_size, block_keys=BLOCK_INDEX_KEYS)
    queries = q.astype(jnp.float32)
    most = min(top_k, page_table.shape[1] * index.page_size)

    def body(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best, where = carry
        ids, seen, visible = blocks.block(number)
        keys = read_pages(index, ids, seen, layer=layer)[:, :, 0]
        products = jnp.einsum("rchd,rkd->rchk", queries, keys, precision=lax.Precision.HIGHEST)
        score = jnp.einsum("rchk,rch->rck", jnp.maximum(products, 0), weights, precision=lax.Precision.HIGHEST)
        # top_k puts -0.0 below 0.0, which are equal scores: a negative weight times the maximum with 0 gives -0.0.
        score = jnp.where(score == 0, jnp.float32(0), score)
        score = jnp.where(visible[:, 0], score, -jnp.inf)
        position = number * blocks.keys + jnp.arange(blocks.keys, dtype=jnp.int32)
        # lax.top_k is stable, and what was found so far stands first: of equal scores the lower position wins. NaN
        # sorts above all and stays visible in what attention reads, so it needs no care here.
        best, chosen = lax.top_k(jnp.concatenate([best, score], axis=-1), most)
        everywhere = jnp.concatenate([where, jnp.broadcast_to(position, score.shape)], axis=-1)
        return best, jnp.take_along_axis(everywhere, chosen, axis=-1)

    start = (jnp.full((rows, chunk, most), -jnp.inf, jnp.float32), jnp.zeros((rows, chunk, most), jnp.int32))
    best, where = lax.fori_loop(0, blocks.stop, body, start)
    past_end = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(best == -jnp.inf, past_end, where), axis=-1)
    return jnp.where(ordered == past_end, -1, ordered)


IMPL = Impl(name="xla", run=_run)
