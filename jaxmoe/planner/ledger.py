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
from jaxmoe.nn.step import Layout
from jaxmoe.ops.experts.xla import tile_rows
from jaxmoe.ops.pages import KVDtype, KVPages, abstract_pages
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
}


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
        owner = _OWNERS[leaf.entry.role.split(".")[0]] + (" scales" if leaf.part == "scale" else "")
        device[owner] = device.get(owner, 0) + leaf.shard_bytes(plan)
        host[owner] = host.get(owner, 0) + math.prod(leaf.shape) * leaf.dtype.itemsize
    return [
        Item(owner=label + owner, kind="weights", device_bytes=device[owner], host_bytes=host[owner])
        for owner in device
    ]


def page_bytes(pages: KVPages) -> int:
    """Bytes of an abstract or real pool, scales included."""
    arrays = [array for array in (pages.k, pages.v, pages.k_scale, pages.v_scale) if array is not None]
    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays)


def kv_token_bytes(manifest: Manifest, kv_cache: KVDtype) -> int:
    """Bytes of one token's keys and values in all layers, scales included."""
    attention = manifest.config.attention
    one = abstract_pages(
        layers=manifest.config.layers,
        pages=1,
        page_size=1,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        dtype=kv_cache,
    )
    return page_bytes(one)


def workspace_bytes(manifest: Manifest, plan: Plan, layout: Layout, itemsize: int) -> int:
    """Largest temporary memory of one device during a step of this layout.

    The step's widest points are the expert layer (gathered rows, the tile buffer, the combine), one attention block,
    and the logits (vocabulary part of all rows, then all columns of the own rows).
    """
    config = manifest.config
    tokens, ranks = layout.tokens, plan.ways("experts")
    gathered = tokens * ranks
    router = config.moe.router
    slots = -(-router.experts // ranks)
    tile = tile_rows(gathered, router.top_k, router.experts)
    tile_buffer = (gathered * min(router.top_k, slots) // tile + slots) * tile
    experts = (tile_buffer + 2 * gathered) * config.embed * 4 + gathered * config.embed * itemsize
    heads = config.attention.heads
    block = 256
    attention = (
        layout.rows * (2 * layout.chunk * heads * block + 4 * layout.chunk * heads * config.attention.head_dim) * 4
    )
    vocab_part = -(-config.vocab // plan.ways("vocab"))
    logits = layout.logit_rows * plan.ways("vocab") * vocab_part * 4 * 3
    residual = 2 * tokens * config.embed * itemsize
    return residual + max(experts, attention, logits)


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
        label: put before each owner.
    """
    itemsize = np.dtype("float32").itemsize if dtype == "float32" else 2
    leaves = model_leaves(manifest, schemes, plan, _numpy_dtype(dtype))
    pool = pages * page_size * kv_token_bytes(manifest, kv_cache)
    work = max(workspace_bytes(manifest, plan, layout, itemsize) for layout in layouts)
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
