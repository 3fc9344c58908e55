"""latent_attention in plain XLA: the block loop of ops/attention in three ways of reading keys."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmoe.ops.attention.blocks import PageBlocks, attend, read_pages, read_slots
from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.pages import Table

TILE_QUERIES = 16
"""Queries whose selected keys are gathered at once: bounds the gathered block."""
BLOCK_SELECTED = 128
"""Selected keys of one block."""
_HIGHEST = lax.Precision.HIGHEST


def _run(
    q_nope: jax.Array,
    q_rope: jax.Array,
    w_k: jax.Array,
    w_v: jax.Array,
    latent: Table,
    rope: Table,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    layer: jax.Array | int,
    scale: float,
    sinks: jax.Array | None,
    selected: jax.Array | None,
    form: str,
) -> jax.Array:
    dtype = q_nope.dtype
    w_k, w_v = w_k.astype(jnp.float32), w_v.astype(jnp.float32)
    q_nope, q_rope = q_nope.astype(jnp.float32) * scale, q_rope.astype(jnp.float32) * scale
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if form == "expanded":
        out = _expanded(q_nope, q_rope, w_k, w_v, latent, rope, page_table, positions, layer=layer, sinks=sinks)
        return out.astype(dtype)
    # What the latent sees of each query: one product with the key half, instead of one a key.
    queries = jnp.einsum("rchn,hnl->rchl", q_nope, w_k, precision=_HIGHEST)
    queries = jnp.concatenate([queries, q_rope], axis=-1)
    absorbed = _all_keys if selected is None else _selected_keys
    mixed = absorbed(queries, latent, rope, page_table, positions, selected, layer=layer, sinks=sinks)
    return jnp.einsum("rchl,hvl->rchv", mixed, w_v, precision=_HIGHEST).astype(dtype)


def _expanded(
    q_nope: jax.Array,
    q_rope: jax.Array,
    w_k: jax.Array,
    w_v: jax.Array,
    latent: Table,
    rope: Table,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    layer: jax.Array | int,
    sinks: jax.Array | None,
) -> jax.Array:
    chunk, heads = q_nope.shape[1:3]
    blocks = PageBlocks(page_table, positions, latent.page_size)

    def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        ids, seen, visible = blocks.block(index)
        content = read_pages(latent, ids, seen, layer=layer)[:, :, 0]
        turned = read_pages(rope, ids, seen, layer=layer)
        keys = jnp.einsum("rkl,hnl->rkhn", content, w_k, precision=_HIGHEST)
        shared = jnp.broadcast_to(turned, (*keys.shape[:3], turned.shape[-1]))
        values = jnp.einsum("rkl,hvl->rkhv", content, w_v, precision=_HIGHEST)
        return jnp.concatenate([keys, shared], axis=-1), values, visible

    out = attend(
        jnp.concatenate([q_nope, q_rope], axis=-1).transpose(0, 2, 1, 3),
        read,
        start=0,
        stop=blocks.stop,
        v_width=w_v.shape[1],
        real=positions >= 0,
        sinks=None if sinks is None else jnp.broadcast_to(sinks[:, None], (heads, chunk)),
    )
    return out.transpose(0, 2, 1, 3)


def _all_keys(
    queries: jax.Array,
    latent: Table,
    rope: Table,
    page_table: jax.Array,
    positions: jax.Array,
    selected: jax.Array | None,
    *,
    layer: jax.Array | int,
    sinks: jax.Array | None,
) -> jax.Array:
    """[rows, chunk, heads, lora]: mixed latents of all keys up to each query's own."""
    assert selected is None
    rows, chunk, heads, width = queries.shape
    blocks = PageBlocks(page_table, positions, latent.page_size)

    def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        ids, seen, visible = blocks.block(index)
        values = read_pages(latent, ids, seen, layer=layer)
        keys = jnp.concatenate([values, read_pages(rope, ids, seen, layer=layer)], axis=-1)
        return keys, values, jnp.repeat(visible, heads, axis=2)

    out = attend(
        queries.reshape(rows, 1, chunk * heads, width),
        read,
        start=0,
        stop=blocks.stop,
        v_width=latent.data.shape[-1],
        real=jnp.repeat(positions, heads, axis=1) >= 0,
        sinks=None if sinks is None else jnp.tile(sinks, chunk)[None],
    )
    return out.reshape(rows, chunk, heads, -1)


def _selected_keys(
    queries: jax.Array,
    latent: Table,
    rope: Table,
    page_table: jax.Array,
    positions: jax.Array,
    selected: jax.Array | None,
    *,
    layer: jax.Array | int,
    sinks: jax.Array | None,
) -> jax.Array:
    """[rows, chunk, heads, lora]: mixed latents of each query's own selection, a tile of queries at a time."""
    assert selected is not None
    rows, chunk, heads, _ = queries.shape
    count, most = rows * chunk, selected.shape[-1]
    tile, block = min(TILE_QUERIES, count), min(BLOCK_SELECTED, most)
    pad = -count % tile

    def tiles(array: jax.Array, fill: int | float) -> jax.Array:
        flat = array.reshape(count, *array.shape[2:])
        padded = jnp.pad(flat, ((0, pad), *((0, 0),) * (flat.ndim - 1)), constant_values=fill)
        return padded.reshape(-1, tile, *flat.shape[1:])

    chosen = jnp.pad(selected, ((0, 0), (0, 0), (0, -most % block)), constant_values=-1)
    row_of = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], (rows, chunk))

    def run(part: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        part_queries, part_chosen, part_rows, part_positions = part

        def read(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            key = lax.dynamic_slice_in_dim(part_chosen, index * block, block, axis=1)
            seen = (key >= 0) & (key <= part_positions[:, None])
            safe = jnp.where(seen, key, 0)
            ids = page_table[part_rows[:, None], safe // latent.page_size]
            slots = safe % latent.page_size
            values = read_slots(latent, ids, slots, seen, layer=layer)
            keys = jnp.concatenate([values, read_slots(rope, ids, slots, seen, layer=layer)], axis=-1)
            return keys, values, seen[:, None, None, :]

        return attend(
            part_queries[:, None],
            read,
            start=0,
            stop=(jnp.max(jnp.sum(part_chosen >= 0, axis=1)) + block - 1) // block,
            v_width=latent.data.shape[-1],
            real=jnp.broadcast_to(part_positions[:, None] >= 0, (tile, heads)),
            sinks=None if sinks is None else sinks[None],
        )[:, 0]

    arguments = (tiles(queries, 0), tiles(chosen, -1), tiles(row_of, 0), tiles(positions, -1))
    out = lax.map(run, arguments)
    return out.reshape(-1, heads, latent.data.shape[-1])[:count].reshape(rows, chunk, heads, -1)


IMPL = Impl(name="xla", run=_run)
