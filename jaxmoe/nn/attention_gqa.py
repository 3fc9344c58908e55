"""Grouped-query attention on the paged cache: rows stay on the device that holds their pages."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Float32

from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.attention import attention
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.linear import linear
from jaxmoe.ops.pages import KVPages
from jaxmoe.ops.rope import rotate_half


class GQAttention(nnx.Module):
    """q, k, v projections, optional bias, optional per-head norm before or after the rotation, output projection."""

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares the projections."""
        self.config = config.attention
        cfg, embed = config.attention, config.embed
        q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.q = param((q_width, embed), ("q_heads", "embed"), "attention.q")
        self.k = param((kv_width, embed), ("kv_heads", "embed"), "attention.k")
        self.v = param((kv_width, embed), ("kv_heads", "embed"), "attention.v")
        self.o = param((embed, q_width), ("embed", "q_heads"), "attention.o")
        if cfg.bias:
            self.q_bias = param((q_width,), ("q_heads",), "attention.bias")
            self.k_bias = param((kv_width,), ("kv_heads",), "attention.bias")
            self.v_bias = param((kv_width,), ("kv_heads",), "attention.bias")
        if cfg.qk_norm != "none":
            self.q_norm = RMSNorm(cfg.head_dim, "head_dim", config.norm_eps, param, "attention.norm")
            self.k_norm = RMSNorm(cfg.head_dim, "head_dim", config.norm_eps, param, "attention.norm")

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        pages: KVPages,
        batch: StepBatch,
        rope: tuple[Float32[Array, "tokens half"], Float32[Array, "tokens half"]],
        *,
        layer: jax.Array | int,
        cache_layer: jax.Array | int,
        layout: Layout,
    ) -> tuple[Float[Array, "tokens embed"], KVPages]:
        """Writes this step's keys and values, then attends.

        Args:
            x: normalised residual stream.
            pages: cache of this device.
            batch: positions and pages of the new tokens.
            rope: cosine and sine of each token's position.
            layer: index into the weight stack.
            cache_layer: index into the cache.
            layout: shape of the step.
        """
        cfg = self.config
        tokens = x.shape[0]
        biases = (self.q_bias[...], self.k_bias[...], self.v_bias[...]) if cfg.bias else (None, None, None)
        q = linear(x, self.q[...], layer=layer, bias=biases[0]).reshape(tokens, cfg.heads, cfg.head_dim)
        k = linear(x, self.k[...], layer=layer, bias=biases[1]).reshape(tokens, cfg.kv_heads, cfg.head_dim)
        v = linear(x, self.v[...], layer=layer, bias=biases[2]).reshape(tokens, cfg.kv_heads, cfg.head_dim)
        if cfg.qk_norm == "before_rope":
            q, k = self.q_norm(q, layer), self.k_norm(k, layer)
        q, k = rotate_half(q, *rope), rotate_half(k, *rope)
        if cfg.qk_norm == "after_rope":
            q, k = self.q_norm(q, layer), self.k_norm(k, layer)
        with jax.named_scope("kv_write"):
            pages = kv_write(pages, k, v, batch.page_ids, batch.slots, layer=cache_layer)
        with jax.named_scope("attention"):
            out = attention(
                q.reshape(layout.rows, layout.chunk, cfg.heads, cfg.head_dim),
                pages,
                batch.page_table,
                batch.positions.reshape(layout.rows, layout.chunk),
                layer=cache_layer,
                scale=cfg.head_dim**-0.5,
            )
        return linear(out.reshape(tokens, cfg.heads * cfg.head_dim), self.o[...], layer=layer), pages
