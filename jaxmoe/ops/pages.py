"""KVPages: the paged key-value cache of one device, data and scales as one unit."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

KVDtype = Literal["int8", "float32", "bfloat16"]

NULL_PAGE = 0
"""Page 0 of every pool is never written: unused page-table entries point to it, and reads of it are masked."""


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "k_scale", "v_scale"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class KVPages:
    """Keys and values of all layers in fixed-size pages.

    Invariants:
        k.shape == v.shape == (layers, pages, page, kv_heads, head_dim)
        int8:  k_scale.shape == k.shape[:-1], float32, and key ~ k * k_scale[..., None]; v likewise
        float: k_scale is None and v_scale is None
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Token slots of a page."""
        return self.k.shape[2]

    @property
    def quantized(self) -> bool:
        """Whether data is INT8 with scales."""
        return self.k_scale is not None


def abstract_pages(*, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: KVDtype) -> KVPages:
    """Shapes and dtypes of a pool; nothing is allocated."""
    data = jax.ShapeDtypeStruct((layers, pages, page_size, kv_heads, head_dim), jnp.dtype(dtype))
    scale = jax.ShapeDtypeStruct(data.shape[:-1], jnp.float32) if dtype == "int8" else None
    return KVPages(k=data, v=data, k_scale=scale, v_scale=scale)


def fill_pages(pages: KVPages, page_ids: Int32[Array, " count"], data: int = 0, scale: float = 0.0) -> KVPages:
    """Overwrites whole pages in all layers; ids equal to `num_pages` are padding and touch nothing.

    The step zeroes freshly allocated pages with it before any write; debug mode poisons free pages with it.
    """

    def fill(array: jax.Array | None, value: int | float) -> jax.Array | None:
        return None if array is None else array.at[:, page_ids].set(jnp.asarray(value, array.dtype), mode="drop")

    value = data if pages.quantized else scale
    return KVPages(
        k=fill(pages.k, value),
        v=fill(pages.v, value),
        k_scale=fill(pages.k_scale, scale),
        v_scale=fill(pages.v_scale, scale),
    )
