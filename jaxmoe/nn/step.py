"""The shapes and arrays of one step: what the engine hands to the model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """Static shape of a step on one device: `rows` sequences with `chunk` new tokens each.

    Decode is chunk 1. A compiled program exists per layout; the key length is not part of it.
    """

    rows: int
    chunk: int
    all_logits: bool = False
    """Whether logits of every new token are wanted (evaluation) or of each row's last one (generation)."""

    @property
    def tokens(self) -> int:
        """New tokens of a step on one device, padding included."""
        return self.rows * self.chunk

    @property
    def logit_rows(self) -> int:
        """Rows of logits on one device."""
        return self.tokens if self.all_logits else self.rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "positions", "page_ids", "slots", "page_table", "zero_pages", "last_token"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step's inputs; inside shard_map the leading axis is this device's part."""

    token_ids: Any
    """[tokens] int32; 0 for padding."""
    positions: Any
    """[tokens] int32; -1 for padding."""
    page_ids: Any
    """[tokens] int32: page that takes the token's keys and values; num_pages for padding."""
    slots: Any
    """[tokens] int32: slot in that page."""
    page_table: Any
    """[rows, table_width] int32: pages of each sequence; the null page past its end."""
    zero_pages: Any
    """[zeroed] int32: pages allocated for this step, zeroed before any write; num_pages for padding."""
    last_token: Any
    """[rows] int32: index into the tokens axis of each row's last real token; 0 for an empty row."""
