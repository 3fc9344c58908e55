"""One transformer block: attention and a feed-forward, each on the normalised residual stream."""

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxmoe.nn.attention_gqa import GQAttention
from jaxmoe.nn.attention_latent import LatentAttention
from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.nn.hyper import HyperConnection, write
from jaxmoe.nn.indexer import Indexer
from jaxmoe.nn.mlp import SwiGLU
from jaxmoe.nn.moe import MoE
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.rotary import RopeTables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.nn.tap import tap
from jaxmoe.ops.pages import Pages
from jaxmoe.parallel.exchange import ParallelContext


@partial(jax.tree_util.register_dataclass, data_fields=["x", "pages", "selected"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What blocks hand on."""

    x: Float[Array, "tokens embed"] | Float[Array, "tokens streams embed"]
    """Residual stream, or streams with hyper-connections."""
    pages: Pages
    """Cache of this device."""
    selected: Int32[Array, "rows chunk k"] | None
    """Keys that the last indexer chose; None: all."""


@partial(jax.tree_util.register_dataclass, data_fields=["stream", "gates", "pages", "selected"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class HalfState:
    """What the attention half of a block hands to its feed-forward half."""

    stream: Float[Array, "tokens embed"] | Float[Array, "tokens streams embed"]
    """Residual stream or streams after attention."""
    gates: Float[Array, "tokens streams"] | None
    """How the feed-forward's output enters the streams; None: it is added."""
    pages: Pages
    """As in `State`."""
    selected: Int32[Array, "rows chunk k"] | None
    """As in `State`."""

    def join(self, out: Float[Array, "tokens embed"]) -> jax.Array:
        """The residual stream after the feed-forward gave `out`."""
        return self.stream + out if self.gates is None else write(self.stream, out, self.gates)


class Block(nnx.Module):
    """A stack of equal blocks, dense or mixture-of-experts; `layer` says which."""

    def __init__(self, config: DecoderConfig, *, layers: int, moe: bool, hyper: bool = True):
        """Declares the parts with a leading layers axis; `hyper`: with hyper-connections where the model has them."""
        param = ParamFactory(layers=layers)
        self.layers = layers
        self.is_moe = moe
        self.has_hyper = hyper and config.hyper is not None
        self.attention_norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        grouped = isinstance(config.attention, AttentionConfig)
        self.attention = GQAttention(config, param) if grouped else LatentAttention(config, param)
        self.ffn_norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        self.ffn = MoE(config, param) if moe else SwiGLU(config.embed, config.ffn, "ffn", "ffn", param)
        if self.has_hyper:
            self.attention_hyper = HyperConnection(config, param)
            self.ffn_hyper = HyperConnection(config, param)

    def __call__(
        self,
        state: State,
        batch: StepBatch,
        rope: RopeTables,
        indexer: Indexer | None,
        *,
        layer: jax.Array,
        first_layer: int,
        layout: Layout,
        parallel: ParallelContext,
    ) -> tuple[State, jax.Array | None]:
        """The state after this block, and the expert ids (None for a dense block)."""
        half, normed = self.attend(
            state, batch, rope, indexer, layer=layer, first_layer=first_layer, layout=layout, parallel=parallel
        )
        if isinstance(self.ffn, MoE):
            out, ids = self.ffn(normed, batch.positions >= 0, layer=layer, parallel=parallel)
        else:
            out, ids = self.ffn(normed, layer), None
        return State(x=half.join(out), pages=half.pages, selected=half.selected), ids

    def attend(
        self,
        state: State,
        batch: StepBatch,
        rope: RopeTables,
        indexer: Indexer | None,
        *,
        layer: jax.Array,
        first_layer: int,
        layout: Layout,
        parallel: ParallelContext,
    ) -> tuple[HalfState, Float[Array, "tokens embed"]]:
        """The first half: the state between attention and the feed-forward, and what the feed-forward is fed."""
        x, gates = self.attention_hyper(state.x, layer) if self.has_hyper else (state.x, None)
        normed = tap(self.attention_norm(x, layer), "attention.in")
        where = {"layer": layer, "cache_layer": layer + first_layer, "layout": layout, "parallel": parallel}
        if isinstance(self.attention, GQAttention):
            mixed, pages = self.attention(normed, state.pages, batch, rope, **where)
            selected = state.selected
        else:
            mixed, pages, selected = self.attention(normed, state.pages, batch, rope, state.selected, indexer, **where)
        stream = state.x + mixed if gates is None else write(state.x, mixed, gates)
        x, gates = self.ffn_hyper(stream, layer) if self.has_hyper else (stream, None)
        half = HalfState(stream=stream, gates=gates, pages=pages, selected=selected)
        return half, tap(self.ffn_norm(x, layer), "ffn.in")
