"""index_select in plain XLA: scores block by block up to the longest sequence, then one top-k."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.ops.attention.blocks import PageBlocks, read_pages
from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.pages import Table


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
    blocks = PageBlocks(page_table, positions, index.page_size)
    queries = q.astype(jnp.float32)

    def body(number: jax.Array, scores: jax.Array) -> jax.Array:
        ids, seen, visible = blocks.block(number)
        keys = read_pages(index, ids, seen, layer=layer)[:, :, 0]
        products = jnp.einsum("rchd,rkd->rchk", queries, keys, precision=lax.Precision.HIGHEST)
        score = jnp.einsum("rchk,rch->rck", jnp.maximum(products, 0), weights, precision=lax.Precision.HIGHEST)
        # top_k puts -0.0 below 0.0, which are equal scores: a negative weight times the maximum with 0 gives -0.0.
        score = jnp.where(score == 0, jnp.float32(0), score)
        score = jnp.where(visible[:, 0], score, -jnp.inf)
        return lax.dynamic_update_slice(scores, score, (0, 0, number * blocks.keys))

    scores = jnp.full((rows, chunk, blocks.num_blocks * blocks.keys), -jnp.inf, jnp.float32)
    scores = lax.fori_loop(0, blocks.stop, body, scores)
    most = min(top_k, page_table.shape[1] * index.page_size)
    # lax.top_k is stable: of equal scores the lower position comes first. NaN would sort above all and stays visible
    # in what attention reads, so it needs no care here.
    best, chosen = lax.top_k(scores, most)
    past_end = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(best == -jnp.inf, past_end, chosen.astype(jnp.int32)), axis=-1)
    return jnp.where(ordered == past_end, -1, ordered)


IMPL = Impl(name="xla", run=_run)
