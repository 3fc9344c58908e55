"""kv_write: puts new keys and values into their pages, quantised when the pages are INT8.

Contract
    k, v       [tokens, kv_heads, head_dim] float; one scale per token and head (quant.int8.quantize_slices).
    page_ids   [tokens] int32; `num_pages` marks a padded token, which writes nothing. Never the null page.
    slots      [tokens] int32, 0..page_size-1.
    The result aliases the input pages when the caller donates them.
"""

import jax
from jaxtyping import Array, Float, Int, Int32

from jaxmoe.ops import dispatch
from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.pages import KVPages
from jaxmoe.quant.int8 import quantize_slices


def _xla(
    pages: KVPages, k: jax.Array, v: jax.Array, page_ids: jax.Array, slots: jax.Array, *, layer: jax.Array | int
) -> KVPages:
    def write(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[layer, page_ids, slots].set(value.astype(array.dtype), mode="drop")

    if not pages.quantized:
        return KVPages(k=write(pages.k, k), v=write(pages.v, v), k_scale=None, v_scale=None)
    kq, ks = quantize_slices(k)
    vq, vs = quantize_slices(v)
    return KVPages(
        k=write(pages.k, kq), v=write(pages.v, vq), k_scale=write(pages.k_scale, ks), v_scale=write(pages.v_scale, vs)
    )


IMPLS = (Impl(name="xla", run=_xla),)


def kv_write(
    pages: KVPages,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    page_ids: Int32[Array, " tokens"],
    slots: Int32[Array, " tokens"],
    *,
    layer: Int[Array, ""] | int,
    impl: str | None = None,
) -> KVPages:
    """Writes one layer's new keys and values.

    Raises:
        UnsupportedError: no implementation accepts the arguments.
    """
    choice = dispatch.choose("kv_write", IMPLS, impl, pages, k, v, page_ids, slots, layer=layer)
    return choice.impl.run(pages, k, v, page_ids, slots, layer=layer)
