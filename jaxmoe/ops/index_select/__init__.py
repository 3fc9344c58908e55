"""index_select: which keys each new token may attend to, by a small attention of its own (DSA indexer).

Contract
    q            [rows, chunk, heads, width] float, rotated; the new tokens' index keys are already written.
    weights      [rows, chunk, heads] float32, all constants folded in.
    index        table of one head of `width`.
    score(t)     sum over heads of weights[h] * max(q[h] . key[t], 0), in float32, for t = 0..position.
    result       [rows, chunk, min(top_k, capacity)] int32: the positions of the top_k best scores, ascending, then -1.
                 Of equal scores the lower position wins: the maximum with 0 makes many scores exactly equal, and
                 prefill and decode must choose alike. A padded query chooses nothing.
"""

from jaxtyping import Array, Float, Float32, Int, Int32

from jaxmoe.ops import dispatch
from jaxmoe.ops.index_select import xla
from jaxmoe.ops.pages import Table

IMPLS = (xla.IMPL,)


def index_select(
    q: Float[Array, "rows chunk heads width"],
    weights: Float32[Array, "rows chunk heads"],
    index: Table,
    page_table: Int32[Array, "rows table_width"],
    positions: Int32[Array, "rows chunk"],
    *,
    layer: Int[Array, ""] | int,
    top_k: int,
    impl: str | None = None,
) -> Int32[Array, "rows chunk k"]:
    """Chooses keys.

    Args:
        q: index queries.
        weights: of the heads.
        index: index keys of this device.
        page_table: pages of each sequence.
        positions: position of each query, -1 for padding.
        layer: index into the table.
        top_k: keys to choose.
        impl: name of one implementation; None takes the first that does not refuse.

    Raises:
        ValueError: widths differ.
        UnsupportedError: no implementation accepts the arguments.
    """
    if index.data.shape[-2:] != (1, q.shape[-1]):
        raise ValueError(f"index_select: q {list(q.shape)} does not fit keys {list(index.data.shape)}")
    arguments, options = (q, weights, index, page_table, positions), {"layer": layer, "top_k": top_k}
    choice = dispatch.choose("index_select", IMPLS, impl, *arguments, **options)
    return choice.impl.run(*arguments, **options)
