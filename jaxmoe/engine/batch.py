"""Assembles a step's arrays on the host, and checks every index there: on the device a wrong one would be silent."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jaxmoe.engine.config import EngineConfig
from jaxmoe.errors import EngineError
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.pages import NULL_PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInput:
    """One row of a step: new tokens of one sequence and the pages that hold it, the new ones included."""

    shard: int
    row: int
    token_ids: Seq[int]
    start: int
    """Position of the first new token."""
    pages: Seq[int]


def build_batch(
    layout: Layout,
    rows: Iterable[RowInput],
    zero_pages: Seq[Seq[int]],
    *,
    config: EngineConfig,
    shards: int,
    vocab: int,
) -> StepBatch:
    """Arrays of all devices, the device axis folded into the first: [shards * tokens], [shards * rows, ...].

    Args:
        layout: shape of the step on one device.
        rows: rows that hold work; the others are padding.
        zero_pages: for each device, the pages that were allocated for this step.
        config: page size and pool size.
        shards: devices.
        vocab: tokens of the model.

    Raises:
        EngineError: a row, page, position or token is out of range, or a row is given twice.
    """
    tokens = layout.tokens
    zeroed = config.zeroed(layout)
    batch = StepBatch(
        token_ids=np.zeros((shards, tokens), np.int32),
        positions=np.full((shards, tokens), -1, np.int32),
        page_ids=np.full((shards, tokens), config.pages, np.int32),
        slots=np.zeros((shards, tokens), np.int32),
        page_table=np.full((shards, layout.rows, config.table_width), NULL_PAGE, np.int32),
        zero_pages=np.full((shards, zeroed), config.pages, np.int32),
        last_token=np.zeros((shards, layout.rows), np.int32),
    )
    taken: set[tuple[int, int]] = set()
    for entry in rows:
        _check_row(entry, layout, config, shards, vocab)
        if (entry.shard, entry.row) in taken:
            raise EngineError(f"row {entry.row} of device {entry.shard} is given twice")
        taken.add((entry.shard, entry.row))
        count = len(entry.token_ids)
        span = slice(entry.row * layout.chunk, entry.row * layout.chunk + count)
        positions = np.arange(entry.start, entry.start + count, dtype=np.int32)
        pages = np.asarray(entry.pages, np.int32)
        batch.token_ids[entry.shard, span] = entry.token_ids
        batch.positions[entry.shard, span] = positions
        batch.page_ids[entry.shard, span] = pages[positions // config.page_size]
        batch.slots[entry.shard, span] = positions % config.page_size
        batch.page_table[entry.shard, entry.row, : len(pages)] = pages
        batch.last_token[entry.shard, entry.row] = span.stop - 1
    if len(zero_pages) != shards:
        raise EngineError(f"{len(zero_pages)} lists of pages to zero for {shards} devices")
    for shard, pages in enumerate(zero_pages):
        if len(pages) > zeroed or any(not NULL_PAGE < page < config.pages for page in pages):
            raise EngineError(f"pages {list(pages)} to zero do not fit {zeroed} entries of a pool of {config.pages}")
        batch.zero_pages[shard, : len(pages)] = pages
    return StepBatch(
        token_ids=batch.token_ids.reshape(-1),
        positions=batch.positions.reshape(-1),
        page_ids=batch.page_ids.reshape(-1),
        slots=batch.slots.reshape(-1),
        page_table=batch.page_table.reshape(shards * layout.rows, -1),
        zero_pages=batch.zero_pages.reshape(-1),
        last_token=batch.last_token.reshape(-1),
    )


def _check_row(entry: RowInput, layout: Layout, config: EngineConfig, shards: int, vocab: int) -> None:
    count, stop = len(entry.token_ids), entry.start + len(entry.token_ids)
    if not (0 <= entry.shard < shards and 0 <= entry.row < layout.rows and 1 <= count <= layout.chunk):
        raise EngineError(f"row {entry.row} of device {entry.shard} with {count} tokens does not fit {layout}")
    fits = stop <= len(entry.pages) * config.page_size and len(entry.pages) <= config.table_width
    if entry.start < 0 or stop > config.max_context_tokens or not fits:
        raise EngineError(
            f"positions {entry.start}..{stop - 1} do not fit {len(entry.pages)} pages of {config.page_size} and a "
            f"context of {config.max_context_tokens}"
        )
    if any(not NULL_PAGE < page < config.pages for page in entry.pages):
        raise EngineError(f"pages {list(entry.pages)} are not all in 1..{config.pages - 1}")
    if any(not 0 <= token < vocab for token in entry.token_ids):
        raise EngineError(f"token ids {list(entry.token_ids)[:10]}... are not all in 0..{vocab - 1}")
