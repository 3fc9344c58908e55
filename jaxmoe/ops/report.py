"""Which implementation each operator would use here, and why not the others."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmoe.ops import attention, dispatch, experts, kv_write, linear
from jaxmoe.ops.pages import abstract_pages
from jaxmoe.quant.qarray import QArray, quantize_weight
from jaxmoe.quant.scheme import Scheme


def operator_report() -> list[str]:
    """One line an operator, for typical INT8 arguments; nothing is allocated."""

    def abstract(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def quantized(*shape: int) -> QArray:
        return jax.eval_shape(lambda w: quantize_weight(w, Scheme()), abstract(*shape))

    x, layer = abstract(8, 256), abstract(dtype=jnp.int32)
    gate, down = quantized(2, 4, 128, 256), quantized(2, 4, 256, 128)
    ids, weights = abstract(8, 2, dtype=jnp.int32), abstract(8, 2)
    pages = abstract_pages(layers=2, pages=8, page_size=16, kv_heads=2, head_dim=64, dtype="int8")
    table, positions = abstract(8, 4, dtype=jnp.int32), abstract(8, 1, dtype=jnp.int32)
    kv, index = abstract(8, 2, 64), abstract(8, dtype=jnp.int32)
    questions = (
        ("linear", linear.IMPLS, (x, quantized(2, 256, 256)), {"layer": layer, "bias": None}),
        ("experts", experts.IMPLS, (x, ids, weights, gate, gate, down), {"layer": layer, "total_experts": 4}),
        (
            "attention",
            attention.IMPLS,
            (abstract(8, 1, 4, 64), pages, table, positions),
            {"layer": layer, "scale": 1.0},
        ),
        ("kv_write", kv_write.IMPLS, (pages, kv, kv, index, index), {"layer": layer}),
    )
    return [
        str(dispatch.choose(name, impls, None, *arguments, **keywords))
        for name, impls, arguments, keywords in questions
    ]
