"""linear: `x @ w.T (+ bias)` for a float weight, integer weights with INT8 activations, and weight-only integers.

Contract
    x          [tokens, in] float; the result is [tokens, out] of x's dtype.
    w          Array or QArray [out, in], or a stack [layers, out, in] with `layer`, a traced index: implementations
               read the layer in place, so that a scan over layers copies nothing.
    W8A8       x is quantised per token (quant.int8.quantize_slices) to xq, sx. For each group g of the input axis, in
               ascending order, starting from the first term: acc += float32(sum_k xq[k] * wq[k]) * sw[g], the inner
               sum exact in INT32; then acc * sx (+ bias), then the cast to x's dtype.
    W4A8       the same with the weight's 4-bit integers, widened to INT8.
    W8A16      the weight is dequantised to float32 and multiplied as float; W4A16 likewise.
"""

from jaxtyping import Array, Float, Int

from jaxmoe.ops import dispatch
from jaxmoe.ops.linear import xla
from jaxmoe.quant.qarray import QArray, Weight

IMPLS = (xla.IMPL,)


def linear(
    x: Float[Array, "tokens in"],
    w: Weight,
    *,
    layer: Int[Array, ""] | int | None = None,
    bias: Float[Array, "*layers out"] | None = None,
    impl: str | None = None,
) -> Float[Array, "tokens out"]:
    """Applies a weight to each token's vector.

    Args:
        x: activations.
        w: weight, or a stack of them.
        layer: index into the stack; None when `w` is a single weight. In range: the caller guarantees it.
        bias: [out] or [layers, out] like `w`.
        impl: name of one implementation; None takes the first that does not refuse.

    Raises:
        ValueError: ranks or sizes do not match; both operands are named.
        UnsupportedError: no implementation accepts the arguments.
    """
    rank = 2 if layer is None else 3
    if w.ndim != rank or x.shape[-1] != w.shape[-1]:
        kind = "QArray" if isinstance(w, QArray) else "Array"
        raise ValueError(
            f"linear: x {x.dtype}{list(x.shape)} does not fit w {kind} {w.dtype}{list(w.shape)} "
            f"({'no layer index' if layer is None else 'with a layer index'})"
        )
    if bias is not None and bias.shape != w.shape[:-1]:
        raise ValueError(f"linear: bias {list(bias.shape)} does not fit w {list(w.shape)}")
    choice = dispatch.choose("linear", IMPLS, impl, x, w, layer=layer, bias=bias)
    return choice.impl.run(x, w, layer=layer, bias=bias)
