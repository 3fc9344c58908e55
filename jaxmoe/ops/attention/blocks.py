"""Online softmax over blocks of keys: the loop that all attention in plain XLA shares.

Where keys come from is the caller's: pages of a sequence in order, latents that are expanded on the way, or single
slots that an indexer chose. Blocks that no query sees leave the running sums as they are, bit for bit, so that a
result does not depend on how far the loop went for other rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32

from jaxmoe.ops.pages import Table

BLOCK_KEYS = 256
"""Keys of a block of pages; a block holds at least one page."""
_MASKED = -1e30

ReadBlock = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""Block index -> keys [rows, block, heads, width], values [rows, block, heads, v_width], visible [rows, 1 or heads,
queries, block]; all float32 but the last, and finite wherever nothing is visible."""


def attend(
    queries: Float32[Array, "rows heads queries width"],
    read: ReadBlock,
    *,
    start: Int[Array, ""] | int,
    stop: Int[Array, ""],
    v_width: int,
    real: Bool[Array, "rows queries"],
    sinks: Float32[Array, "heads queries"] | None = None,
) -> Float32[Array, "rows heads queries v_width"]:
    """Softmax attention over the keys of blocks start .. stop - 1.

    Args:
        queries: scaled queries.
        read: gives a block.
        start: first block.
        stop: block after the last.
        v_width: width of a value.
        real: queries that are no padding; the others give zeros.
        sinks: a logit of each head in the denominator, without a value.
    """
    shape = queries.shape[:3]

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        peak, total, out = carry
        keys, values, visible = read(index)
        scores = jnp.einsum("rhqd,rkhd->rhqk", queries, keys, precision=lax.Precision.HIGHEST)
        scores = jnp.where(visible, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        # A query that sees no key yet keeps the peak at the mask's value, where exp(0) = 1 must not count.
        probs = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), jnp.float32(0))
        decay = jnp.exp(peak - new_peak)
        total = total * decay + jnp.sum(probs, axis=-1)
        out = out * decay[..., None] + jnp.einsum("rhqk,rkhd->rhqd", probs, values, precision=lax.Precision.HIGHEST)
        return new_peak, total, out

    if sinks is None:
        peak, total = jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        # The sink is the first score of every query: exp(sink - sink) = 1, with a value of zero.
        peak, total = jnp.broadcast_to(sinks[None], shape), jnp.ones(shape, jnp.float32)
    _, total, out = lax.fori_loop(start, stop, body, (peak, total, jnp.zeros((*shape, v_width), jnp.float32)))
    # A padded query has total 0. The test is on the query: a total of NaN must reach the result, not become 0.
    keep = real[:, None, :]
    return jnp.where(keep[..., None], out / jnp.where(keep, total, 1)[..., None], jnp.float32(0))


def read_pages(
    table: Table, ids: Int32[Array, "rows pages"], seen: Bool[Array, "rows keys"], *, layer: Int[Array, ""] | int
) -> Float32[Array, "rows keys heads width"]:
    """One block of a table in key order; zero where a row has no key.

    Widening INT8 reads and writes every element anyway, so the scale and the guard ride along for nothing. The guard is
    a select: what an unwritten slot holds, NaN included, never reaches a product.
    """
    heads, width = table.data.shape[-2:]
    block = table.data[layer, ids].reshape(*seen.shape, heads, width).astype(jnp.float32)
    if table.scale is not None:
        block = block * table.scale[layer, ids].reshape(*seen.shape, heads, 1)
    return jnp.where(seen[:, :, None, None], block, jnp.float32(0))


def read_slots(
    table: Table,
    page_ids: Int32[Array, "rows keys"],
    slots: Int32[Array, "rows keys"],
    seen: Bool[Array, "rows keys"],
    *,
    layer: Int[Array, ""] | int,
) -> Float32[Array, "rows keys heads width"]:
    """Single slots of a table; zero where `seen` is false."""
    block = table.data[layer, page_ids, slots].astype(jnp.float32)
    if table.scale is not None:
        block = block * table.scale[layer, page_ids, slots][..., None]
    return jnp.where(seen[:, :, None, None], block, jnp.float32(0))


class PageBlocks:
    """The blocks of pages that a step's queries can see: which there are, and the keys in each."""

    def __init__(
        self,
        page_table: Int32[Array, "rows table_width"],
        positions: Int32[Array, "rows chunk"],
        page_size: int,
        window: Int[Array, ""] | int | None = None,
        block_keys: int = BLOCK_KEYS,
    ):
        """Cuts the pages.

        Args:
            page_table: pages of each sequence.
            positions: position of each query, -1 for padding.
            page_size: slots of a page.
            window: keys that a query sees; 0 or None for all.
            block_keys: keys of a block; at least one page.
        """
        width = page_table.shape[1]
        self._pages = min(max(1, block_keys // page_size), width)
        self._table = jnp.pad(page_table, ((0, 0), (0, -width % self._pages)))
        self._positions, self._window = positions, window
        self._longest = jnp.max(positions, axis=1)
        self._earliest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=1)
        self.keys = self._pages * page_size
        self.stop = (jnp.max(positions) + self.keys) // self.keys
        self.start: jax.Array | int = 0
        if window is not None:
            first = jnp.where(jnp.asarray(window) > 0, jnp.min(self._earliest) - window + 1, 0)
            self.start = jnp.clip(first // self.keys, 0, self.stop)

    def block(self, index: Int[Array, ""]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Page ids [rows, pages], seen [rows, keys] (some query of the row may), visible [rows, 1, chunk, keys]."""
        ids = lax.dynamic_slice_in_dim(self._table, index * self._pages, self._pages, axis=1)
        key = index * self.keys + jnp.arange(self.keys, dtype=jnp.int32)
        seen = key[None, :] <= self._longest[:, None]
        limit = self._positions[:, None, :, None]
        visible = key[None, None, None, :] <= limit
        if self._window is not None:
            every = jnp.asarray(self._window) <= 0
            # Of the row and of each query: a page that all windows have left behind may be given away.
            seen = seen & ((key[None, :] > self._earliest[:, None] - self._window) | every)
            visible = visible & ((key[None, None, None, :] > limit - self._window) | every)
        return ids, seen, visible
