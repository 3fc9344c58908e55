"""The memory ledger: every byte by owner, predicted from the manifest, the plan and the engine's shapes.

Weights, scales and pages are exact. Workspace is the sum of the arrays that live at the widest points of a step.
Bytes are of one device; on emulated devices, which share one host and one copy of replicated weights, `host_bytes`
adds them up.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from jaxmoe.errors import MemoryPlanError
from jaxmoe.models.leaves import Leaf, Schemes, model_leaves
from jaxmoe.models.manifest import Manifest
from jaxmoe.nn.cache import cache_tables
from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.nn.step import Layout
from jaxmoe.ops.attention.blocks import BLOCK_KEYS
from jaxmoe.ops.experts.xla import tile_rows
from jaxmoe.ops.index_select.xla import BLOCK_INDEX_KEYS
from jaxmoe.ops.latent_attention import choose_form
from jaxmoe.ops.latent_attention.xla import BLOCK_SELECTED, TILE_QUERIES
from jaxmoe.ops.pages import KVDtype, TableSpec, abstract_pages, pages_bytes
from jaxmoe.parallel.plan import Plan

Kind = Literal["weights", "pages", "workspace", "reserve"]

_OWNERS = {
    "embed": "embedding and head",
    "head": "embedding and head",
    "attention": "attention",
    "experts": "routed experts",
    "shared": "shared experts",
    "ffn": "dense feed-forward",
    "router": "router",
    "norm": "norms",
    "indexer": "indexer",
    "hyper": "hyper-connections",
}
_MTP = "multi-token prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of the ledger."""

    owner: str
    kind: Kind
    device_bytes: int
    """Of one device."""
    host_bytes: int
    """Of all devices when they share a host: replicated weights once, everything else once a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a run will hold."""

    devices: int
    items: tuple[Item, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes of one device."""
        return sum(item.device_bytes for item in self.items)

    @property
    def host_bytes(self) -> int:
        """Bytes of a host that emulates all devices."""
        return sum(item.host_bytes for item in self.items)

    def check(self, limit_bytes: int, *, shared_host: bool) -> None:
        """Refuses a run that does not fit.

        Raises:
            MemoryPlanError: it needs more; the three largest items are named.
        """
        need = self.host_bytes if shared_host else self.device_bytes
        if need <= limit_bytes:
            return
        size = (lambda item: item.host_bytes) if shared_host else (lambda item: item.device_bytes)
        largest = sorted(self.items, key=size, reverse=True)[:3]
        named = ", ".join(f"{item.owner} {gib(size(item))}" for item in largest)
        raise MemoryPlanError(
            f"needs {gib(need)}, there are {gib(limit_bytes)} {'on this host' if shared_host else 'per device'}; "
            f"largest: {named}; use fewer pages, shorter chunks or more devices"
        )


def gib(count: int | float) -> str:
    """Bytes as text: '1.23 GiB', or MiB below one GiB."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"


def weight_items(leaves: Iterable[Leaf], plan: Plan, label: str = "") -> list[Item]:
    """Weights and scales by owner; exact."""
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for leaf in leaves:
        kind = _MTP if leaf.entry.path.startswith("mtp.") else _OWNERS[leaf.entry.role.split(".")[0]]
        owner = kind + (" scales" if leaf.part == "scale" else "")
        device[owner] = device.get(owner, 0) + leaf.shard_bytes(plan)
        host[owner] = host.get(owner, 0) + leaf.nbytes
    return [
        Item(owner=label + owner, kind="weights", device_bytes=device[owner], host_bytes=host[owner])
        for owner in device
    ]


def kv_token_bytes(manifest: Manifest, kv_cache: KVDtype, plan: Plan | None = None) -> int:
    """Bytes of one token in all tables of the cache, scales included; of one device where a plan splits heads."""
    tables = [
        TableSpec(
            name=table.name,
            layers=table.layers,
            heads=table.heads // (1 if plan is None else plan.ways(table.heads_axis)),
            width=table.width,
            heads_axis=table.heads_axis,
        )
        for table in cache_tables(manifest.config)
    ]
    return pages_bytes(abstract_pages(tables, pages=1, page_size=1, dtype=kv_cache))


def workspace_bytes(manifest: Manifest, plan: Plan, layout: Layout, itemsize: int, table_tokens: int = 0) -> int:
    """Largest temporary memory of one device during a step of this layout.

    The step's widest points are the expert layer (gathered rows, the tile buffer, the combine), one attention block,
    the index scores, and the logits (vocabulary part of all rows, then all columns of the own rows).

    Args:
        manifest: the model.
        plan: how it is split.
        layout: shape of the step on one device.
        itemsize: bytes of an activation.
        table_tokens: tokens that a page table row can hold; sizes the index scores.
    """
    config = manifest.config
    tokens, ranks = layout.tokens, plan.ways("experts")
    gathered = tokens * _row_ways(plan, "experts")
    router = config.moe.router
    slots = -(-router.experts // ranks)
    tile = tile_rows(gathered, router.top_k, router.experts)
    tile_buffer = (gathered * min(router.top_k, slots) // tile + slots) * tile
    experts = (tile_buffer + 2 * gathered) * config.embed * 4 + gathered * config.embed * itemsize
    vocab_part = -(-config.vocab // plan.ways("vocab"))
    logits = layout.logit_rows * _row_ways(plan, "vocab") * vocab_part * 4 * 3
    streams = 1 if config.hyper is None else config.hyper.streams
    residual = 2 * tokens * config.embed * streams * itemsize
    attention = _attention_bytes(config, plan, layout, table_tokens)
    return residual + max(experts, attention, logits)


def _row_ways(plan: Plan, axis: str) -> int:
    """Devices whose rows meet where `axis` is split: those along mesh axes that split rows too."""
    rows = plan.mesh_axes("tokens")
    return math.prod(plan.mesh[name] for name in plan.mesh_axes(axis) if name in rows)


def _attention_bytes(config: DecoderConfig, plan: Plan, layout: Layout, table_tokens: int) -> int:
    """Scores and probabilities of one block of keys, queries and sums, and what the block's keys are widened to."""
    attention, tokens = config.attention, layout.tokens
    heads = attention.heads // plan.ways("q_heads")
    if isinstance(attention, AttentionConfig):
        return (2 * tokens * heads * BLOCK_KEYS + 4 * tokens * heads * attention.head_dim) * 4
    lora, nope, value = attention.kv_lora, attention.nope_dim, attention.v_dim
    width = lora + attention.rope_dim
    indexer = attention.indexer
    if indexer is None or table_tokens <= indexer.top_k:
        if choose_form(layout.chunk, lora, nope, value) == "expanded":
            keys = layout.rows * BLOCK_KEYS * heads * (nope + attention.rope_dim + value)
            queries = 4 * tokens * heads * max(value, nope + attention.rope_dim)
        else:
            keys, queries = layout.rows * BLOCK_KEYS * (width + lora), 4 * tokens * heads * width
        return (keys + queries + 2 * tokens * heads * BLOCK_KEYS) * 4
    tile = min(TILE_QUERIES, tokens)
    gathered = tile * BLOCK_SELECTED * (width + lora) + 2 * tile * heads * BLOCK_SELECTED
    # Products of one block with all index heads, and the best so far against the block's scores, twice with places.
    index = tokens * indexer.heads * BLOCK_INDEX_KEYS + 4 * tokens * (indexer.top_k + BLOCK_INDEX_KEYS)
    return (max(gathered + 3 * tokens * heads * width, index) + tokens * indexer.top_k) * 4


def serve_items(
    manifest: Manifest,
    schemes: Schemes,
    plan: Plan,
    *,
    dtype: str,
    kv_cache: KVDtype,
    page_size: int,
    pages: int,
    layouts: Sequence[Layout],
    table_tokens: int = 0,
    label: str = "",
) -> list[Item]:
    """Lines of one model with its pages; workspace is that of the largest layout.

    Args:
        manifest: the model.
        schemes: how its parameters are stored.
        plan: how they are split.
        dtype: of float weights and activations.
        kv_cache: storage of keys and values.
        page_size: tokens of a page.
        pages: pages of each device.
        layouts: shapes of steps.
        table_tokens: tokens that a page table row can hold.
        label: put before each owner.
    """
    itemsize = np.dtype("float32").itemsize if dtype == "float32" else 2
    leaves = model_leaves(manifest, schemes, plan, _numpy_dtype(dtype))
    pool = pages * page_size * kv_token_bytes(manifest, kv_cache, plan)
    work = max(workspace_bytes(manifest, plan, layout, itemsize, table_tokens) for layout in layouts)
    return [
        *weight_items(leaves, plan, label),
        Item(
            owner=f"{label}keys and values ({kv_cache})",
            kind="pages",
            device_bytes=pool,
            host_bytes=pool * plan.num_devices,
        ),
        Item(owner=f"{label}workspace", kind="workspace", device_bytes=work, host_bytes=work * plan.num_devices),
    ]


def reserve_item(owner: str, host_bytes: int, devices: int) -> Item:
    """A line for what is not arrays: interpreter, libraries, compiled programs."""
    return Item(owner=owner, kind="reserve", device_bytes=host_bytes // devices, host_bytes=host_bytes)


def _numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
