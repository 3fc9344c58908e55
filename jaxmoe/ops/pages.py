"""The paged cache of one device: named tables of fixed-size pages, data and scales of each as one unit.

Every table has the same pages: page 7 of 'k' and page 7 of 'v' belong to the same tokens. Grouped-query attention has
tables 'k' and 'v', latent attention 'latent' and 'rope', an indexer 'index' with layers of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

KVDtype = Literal["int8", "float32", "bfloat16"]

NULL_PAGE = 0
"""Page 0 of every pool is never written: unused page-table entries point to it, and reads of it are masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """What one table keeps of a token."""

    name: str
    layers: int
    heads: int
    width: int
    heads_axis: Literal["kv_heads", "latent"]
    """'kv_heads' may be split over devices, a 'latent' is shared by all heads and is whole on each."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names of the table's scales; the data has one more, never split."""
        return ("layers", "pages", "page", self.heads_axis)


@partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One kind of cached vector, all layers.

    Invariants:
        data.shape == (layers, pages, page, heads, width)
        int8:  scale.shape == data.shape[:-1], float32, and vector ~ data * scale[..., None]
        float: scale is None
    """

    data: Any
    scale: Any

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self.data.shape[1]

    @property
    def page_size(self) -> int:
        """Token slots of a page."""
        return self.data.shape[2]

    @property
    def quantized(self) -> bool:
        """Whether data is INT8 with scales."""
        return self.scale is not None


Pages = dict[str, Table]
"""The cache: table name -> table."""


def abstract_pages(specs: Sequence[TableSpec], *, pages: int, page_size: int, dtype: KVDtype) -> Pages:
    """Shapes and dtypes of a pool; nothing is allocated."""

    def table(spec: TableSpec) -> Table:
        data = jax.ShapeDtypeStruct((spec.layers, pages, page_size, spec.heads, spec.width), jnp.dtype(dtype))
        scale = jax.ShapeDtypeStruct(data.shape[:-1], jnp.float32) if dtype == "int8" else None
        return Table(data=data, scale=scale)

    return {spec.name: table(spec) for spec in specs}


def pages_bytes(pages: Pages) -> int:
    """Bytes of an abstract or real pool, scales included."""
    return sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in jax.tree.leaves(pages))


def fill_pages(pages: Pages, page_ids: Int32[Array, " count"], data: int = 0, scale: float = 0.0) -> Pages:
    """Overwrites whole pages in all layers of all tables; ids equal to `num_pages` are padding and touch nothing.

    The step zeroes freshly allocated pages with it before any write; debug mode poisons free pages with it.
    """

    def fill(array: jax.Array, value: int | float) -> jax.Array:
        return array.at[:, page_ids].set(jnp.asarray(value, array.dtype), mode="drop")

    return {
        name: Table(
            data=fill(table.data, data if table.quantized else scale),
            scale=fill(table.scale, scale) if table.quantized else None,
        )
        for name, table in pages.items()
    }
