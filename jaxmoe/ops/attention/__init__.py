"""attention: causal grouped-query attention of new tokens over paged keys and values.

Contract
    q            [rows, chunk, heads, head_dim] float: `chunk` new tokens of each sequence, already written to pages.
    page_table   [rows, table_width] int32: pages of each sequence in order; entries past its length are the null page.
    positions    [rows, chunk] int32: position of each query in its sequence, -1 for a padded query.
    result       [rows, chunk, heads, head_dim] of q's dtype: softmax over keys 0..position, in float32; padded queries
                 give zeros. What lies in a page beyond the sequence never reaches the result, NaN included.
    The key length is not a shape: implementations loop over page blocks up to the largest position.
"""

from jaxtyping import Array, Float, Int, Int32

from jaxmoe.ops import dispatch
from jaxmoe.ops.attention import xla
from jaxmoe.ops.pages import KVPages

IMPLS = (xla.IMPL,)


def attention(
    q: Float[Array, "rows chunk heads head_dim"],
    pages: KVPages,
    page_table: Int32[Array, "rows table_width"],
    positions: Int32[Array, "rows chunk"],
    *,
    layer: Int[Array, ""] | int,
    scale: float,
    impl: str | None = None,
) -> Float[Array, "rows chunk heads head_dim"]:
    """Attends from each query to its sequence's keys up to and including its own position.

    Args:
        q: queries after rotation and normalisation.
        pages: the cache of this device.
        page_table: pages of each sequence.
        positions: position of each query, -1 for padding.
        layer: index into the cache.
        scale: factor on the scores, usually head_dim ** -0.5.
        impl: name of one implementation; None takes the first that does not refuse.

    Raises:
        ValueError: heads are no multiple of the cache's heads, or head sizes differ.
        UnsupportedError: no implementation accepts the arguments.
    """
    kv_heads, head_dim = pages.k.shape[-2:]
    if q.shape[-2] % kv_heads or q.shape[-1] != head_dim:
        raise ValueError(f"attention: q {list(q.shape)} does not fit pages {list(pages.k.shape)}")
    choice = dispatch.choose("attention", IMPLS, impl, q, pages, page_table, positions, layer=layer, scale=scale)
    return choice.impl.run(q, pages, page_table, positions, layer=layer, scale=scale)
