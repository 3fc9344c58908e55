"""Which implementation each operator would use here, and why not the others."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmoe.ops import attention, dispatch, experts, index_select, kv_write, latent_attention, linear
from jaxmoe.ops.pages import Table, TableSpec, abstract_pages
from jaxmoe.quant.qarray import QArray, quantize_weight
from jaxmoe.quant.scheme import Scheme


def operator_report() -> list[str]:
    """One line an operator, for typical INT8 arguments; nothing is allocated."""

    def abstract(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def quantized(*shape: int) -> QArray:
        return jax.eval_shape(lambda w: quantize_weight(w, Scheme()), abstract(*shape))

    def table(heads: int, width: int) -> Table:
        spec = TableSpec(name="table", layers=2, heads=heads, width=width, heads_axis="kv_heads")
        return abstract_pages([spec], pages=8, page_size=16, dtype="int8")["table"]

    x, layer = abstract(8, 256), abstract(dtype=jnp.int32)
    gate, down = quantized(2, 4, 128, 256), quantized(2, 4, 256, 128)
    ids, weights = abstract(8, 2, dtype=jnp.int32), abstract(8, 2)
    where = (abstract(8, 4, dtype=jnp.int32), abstract(8, 1, dtype=jnp.int32))
    index = abstract(8, dtype=jnp.int32)
    latent_queries = (abstract(8, 1, 4, 32), abstract(8, 1, 4, 16))
    latent_weights = (abstract(4, 32, 64), abstract(4, 32, 64))
    questions = (
        ("linear", linear.IMPLS, (x, quantized(2, 256, 256)), {"bias": None}),
        (
            "experts",
            experts.IMPLS,
            (x, ids, weights, gate, gate, down),
            {"total_experts": 4, "activation": experts.SWIGLU, "biases": None},
        ),
        (
            "attention",
            attention.IMPLS,
            (abstract(8, 1, 4, 64), table(2, 64), table(2, 64), *where),
            {"scale": 1.0, "window": None, "sinks": None},
        ),
        (
            "latent_attention",
            latent_attention.IMPLS,
            (*latent_queries, *latent_weights, table(1, 64), table(1, 16), *where),
            {"scale": 1.0, "sinks": None, "selected": None, "form": "absorbed"},
        ),
        (
            "index_select",
            index_select.IMPLS,
            (abstract(8, 1, 4, 64), abstract(8, 1, 4), table(1, 64), *where),
            {"top_k": 16},
        ),
        ("kv_write", kv_write.IMPLS, (table(2, 64), abstract(8, 2, 64), index, index), {}),
    )
    return [
        str(dispatch.choose(name, impls, None, *arguments, layer=layer, **options))
        for name, impls, arguments, options in questions
    ]
