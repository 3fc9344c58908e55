"""The float forward pass of one decoder layer on one sample, with the very blocks that serve; pure, for jit.

All but the routed experts: of a mixture-of-experts layer it ends where those begin.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmoe.nn.block import Block, State
from jaxmoe.nn.cache import cache_tables
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.indexer import Indexer
from jaxmoe.nn.moe import MoE
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.rotary import rope_tables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.pages import abstract_pages
from jaxmoe.parallel.exchange import ParallelContext
from jaxmoe.ptq.taps import with_taps
from jaxmoe.quant.qarray import Weight

_PAGE = 16


@partial(jax.tree_util.register_dataclass, data_fields=["results", "selected", "taps", "cache", "real"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a layer made of a sample; all tokens, padding included."""

    results: dict[str, jax.Array]
    """stream [width, ...]; of a mixture-of-experts layer also normed, ids, weights, gates and shared if it has them."""
    selected: jax.Array | None
    """The sample's choice of keys."""
    taps: dict[str, jax.Array]
    """[width, channels]: what the linear layers are fed."""
    cache: dict[str, jax.Array]
    """[width, heads, channels] float32: what is kept of each token, by table."""
    real: jax.Array
    """[width]: which tokens are no padding."""


def forward_layer(
    config: DecoderConfig,
    width: int,
    weights: dict[str, Weight],
    x: jax.Array,
    length: jax.Array,
    selected: jax.Array | None,
) -> Forward:
    """Runs the layer.

    Args:
        config: of `layer_config`: a model of this one layer.
        width: tokens of the sample, padding included.
        weights: local name -> [1, ...], floats or integers; of routed experts none.
        x: [width, ...] residual stream before the layer.
        length: real tokens.
        selected: keys that the last indexer chose; None: all.
    """
    count = jnp.arange(width, dtype=jnp.int32)
    real = count < length
    layout, parallel = Layout(rows=1, chunk=width), ParallelContext()
    pages_needed = -(-width // _PAGE)
    specs = [replace(spec, layers=max(1, spec.layers)) for spec in cache_tables(config)]
    pages = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        abstract_pages(specs, pages=1 + pages_needed, page_size=_PAGE, dtype="float32"),
    )
    batch = StepBatch(
        token_ids=jnp.zeros(width, jnp.int32),
        positions=jnp.where(real, count, -1),
        page_ids=jnp.where(real, 1 + count // _PAGE, 1 + pages_needed),
        slots=count % _PAGE,
        page_table=1 + jnp.arange(pages_needed, dtype=jnp.int32)[None],
        zero_pages=jnp.zeros(0, jnp.int32),
        last_token=jnp.zeros(1, jnp.int32),
    )

    def layer(weights: dict[str, Weight], state: State) -> tuple[dict[str, jax.Array], Any, dict[str, jax.Array]]:
        block = _bound(
            lambda: Block(config, layers=1, moe=not config.dense_layers),
            {path: array for path, array in weights.items() if not path.startswith("indexer.")},
        )
        own = {path.removeprefix("indexer."): a for path, a in weights.items() if path.startswith("indexer.")}
        indexer = _bound(lambda: Indexer(config, ParamFactory(layers=1)), own) if own else None
        rope = rope_tables(config.attention.rope, batch.positions)
        first = jnp.int32(0)
        half, normed = block.attend(
            state, batch, rope, indexer, layer=first, first_layer=0, layout=layout, parallel=parallel
        )
        cache = {name: _flat(table.data, width) for name, table in half.pages.items()}
        if not isinstance(block.ffn, MoE):
            return {"stream": half.join(block.ffn(normed, first))}, half.selected, cache
        ids, router_weights = block.ffn.router(normed, first)
        results = {"stream": half.stream, "normed": normed, "ids": ids, "weights": router_weights}
        if half.gates is not None:
            results["gates"] = half.gates
        if block.ffn.has_shared:
            results["shared"] = block.ffn.shared(normed, first)
        return results, half.selected, cache

    (results, chosen, cache), taps = with_taps(layer)(weights, State(x=x, pages=pages, selected=selected))
    return Forward(results=results, selected=chosen, taps=taps, cache=cache, real=real)


def _flat(data: jax.Array, width: int) -> jax.Array:
    """[1, pages, page, heads, channels] -> [width, heads, channels]: the sample's pages come after the null page."""
    return data[0, 1:].reshape(-1, *data.shape[3:])[:width]


def _bound(build: Any, weights: dict[str, Weight]) -> Any:
    """The module with its weights; those that are not there (of routed experts) are zeros that nothing reads."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    filled = []
    for path, variable in nnx.to_flat_state(state):
        array = weights.get(".".join(map(str, path)))
        abstract = variable.get_value()
        filled.append((path, nnx.Param(jnp.zeros(abstract.shape, jnp.float32) if array is None else array)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
