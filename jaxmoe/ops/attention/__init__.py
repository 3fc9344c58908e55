"""attention: causal grouped-query attention of new tokens over paged keys and values.

Contract
    q            [rows, chunk, heads, head_dim] float: `chunk` new tokens of each sequence, already written to pages.
    page_table   [rows, table_width] int32: pages of each sequence in order; entries past its length are the null page.
    positions    [rows, chunk] int32: position of each query in its sequence, -1 for a padded query.
    window       keys that a query sees, its own included; 0 or None: all before it.
    sinks        [heads] float: a logit that joins each softmax's denominator and has no value.
    result       [rows, chunk, heads, head_dim] of q's dtype: softmax over keys 0..position, in float32; padded queries
                 give zeros. What lies in a page beyond the sequence never reaches the result, NaN included.
    The key length is not a shape: implementations loop over page blocks up to the largest position.
"""

from jaxtyping import Array, Float, Int, Int32

from jaxmoe.ops import dispatch
from jaxmoe.ops.attention import xla
from jaxmoe.ops.pages import Table

IMPLS = (xla.IMPL,)


def attention(
    q: Float[Array, "rows chunk heads head_dim"],
    k: Table,
    v: Table,
    page_table: Int32[Array, "rows table_width"],
    positions: Int32[Array, "rows chunk"],
    *,
    layer: Int[Array, ""] | int,
    scale: float,
    window: Int[Array, ""] | int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    impl: str | None = None,
) -> Float[Array, "rows chunk heads head_dim"]:
    """Attends from each query to its sequence's keys up to and including its own position.

    Args:
        q: queries after rotation and normalisation.
        k: keys of this device.
        v: values of this device.
        page_table: pages of each sequence.
        positions: position of each query, -1 for padding.
        layer: index into the cache.
        scale: factor on the scores, usually head_dim ** -0.5.
        window: keys that a query sees; 0 or None for all.
        sinks: logits in the denominators.
        impl: name of one implementation; None takes the first that does not refuse.

    Raises:
        ValueError: heads are no multiple of the cache's heads, or sizes of q, k, v and sinks differ.
        UnsupportedError: no implementation accepts the arguments.
    """
    kv_heads, head_dim = k.data.shape[-2:]
    if q.shape[-2] % kv_heads or q.shape[-1] != head_dim:
        raise ValueError(f"attention: q {list(q.shape)} does not fit keys {list(k.data.shape)}")
    if v.data.shape != k.data.shape:
        raise ValueError(f"attention: values {list(v.data.shape)} do not fit keys {list(k.data.shape)}")
    if sinks is not None and sinks.shape != q.shape[-2:-1]:
        raise ValueError(f"attention: sinks {list(sinks.shape)} do not fit q {list(q.shape)}")
    arguments, options = (q, k, v, page_table, positions), {"layer": layer, "scale": scale}
    choice = dispatch.choose("attention", IMPLS, impl, *arguments, **options, window=window, sinks=sinks)
    return choice.impl.run(*arguments, **options, window=window, sinks=sinks)
