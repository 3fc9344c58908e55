"""kv_write: puts new vectors into the pages of one table, quantised when the table is INT8.

Contract
    values     [tokens, heads, width] float; one scale per token and head (quant.int8.quantize_slices).
    page_ids   [tokens] int32; `num_pages` marks a padded token, which writes nothing. Never the null page.
    slots      [tokens] int32, 0..page_size-1.
    The result aliases the input table when the caller donates it.
"""

import jax
from jaxtyping import Array, Float, Int, Int32

from jaxmoe.ops import dispatch
from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.pages import Table
from jaxmoe.quant.int8 import quantize_slices


def _xla(table: Table, values: jax.Array, page_ids: jax.Array, slots: jax.Array, *, layer: jax.Array | int) -> Table:
    def write(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[layer, page_ids, slots].set(value.astype(array.dtype), mode="drop")

    if not table.quantized:
        return Table(data=write(table.data, values), scale=None)
    data, scale = quantize_slices(values)
    return Table(data=write(table.data, data), scale=write(table.scale, scale))


IMPLS = (Impl(name="xla", run=_xla),)


def kv_write(
    table: Table,
    values: Float[Array, "tokens heads width"],
    page_ids: Int32[Array, " tokens"],
    slots: Int32[Array, " tokens"],
    *,
    layer: Int[Array, ""] | int,
    impl: str | None = None,
) -> Table:
    """Writes one layer's new vectors.

    Raises:
        UnsupportedError: no implementation accepts the arguments.
    """
    choice = dispatch.choose("kv_write", IMPLS, impl, table, values, page_ids, slots, layer=layer)
    return choice.impl.run(table, values, page_ids, slots, layer=layer)
