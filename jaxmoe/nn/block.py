"""One transformer block: attention and a feed-forward, each on the normalised residual stream."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.nn.attention_gqa import GQAttention
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.mlp import SwiGLU
from jaxmoe.nn.moe import MoE
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.pages import KVPages
from jaxmoe.parallel.exchange import ParallelContext


class Block(nnx.Module):
    """A stack of equal blocks, dense or mixture-of-experts; `layer` says which."""

    def __init__(self, config: DecoderConfig, *, layers: int, moe: bool):
        """Declares the parts with a leading layers axis."""
        param = ParamFactory(layers=layers)
        self.layers = layers
        self.is_moe = moe
        self.attention_norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        self.attention = GQAttention(config, param)
        self.ffn_norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        self.ffn = MoE(config, param) if moe else SwiGLU(config.embed, config.ffn, "ffn", "ffn", param)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        pages: KVPages,
        batch: StepBatch,
        rope: tuple[jax.Array, jax.Array],
        *,
        layer: jax.Array,
        first_layer: int,
        layout: Layout,
        parallel: ParallelContext,
    ) -> tuple[jax.Array, KVPages, jax.Array | None]:
        """Residual stream, cache, and the expert ids (None for a dense block)."""
        mixed, pages = self.attention(
            self.attention_norm(x, layer),
            pages,
            batch,
            rope,
            layer=layer,
            cache_layer=layer + first_layer,
            layout=layout,
        )
        x = x + mixed
        normed = self.ffn_norm(x, layer)
        if isinstance(self.ffn, MoE):
            out, ids = self.ffn(normed, batch.positions >= 0, layer=layer, parallel=parallel)
            return x + out, pages, ids
        return x + self.ffn(normed, layer), pages, None
