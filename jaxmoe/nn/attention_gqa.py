"""Grouped-query attention on the paged cache: rows stay on the device that holds their pages."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.rotary import RopeTables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.nn.tap import tap
from jaxmoe.ops.attention import attention
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.linear import linear
from jaxmoe.ops.pages import Pages
from jaxmoe.ops.rope import rotate
from jaxmoe.parallel.exchange import ParallelContext, gather_columns, rank_index


class GQAttention(nnx.Module):
    """q, k, v projections, optional bias, optional norm of queries and keys, optional sinks, output projection.

    Heads may be split over devices: each has its part of q, k and v, and of the *outputs* of o, so that every sum runs
    on one device and the result does not depend on the split.
    """

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares the projections."""
        assert isinstance(config.attention, AttentionConfig)
        self.config = config.attention
        cfg, embed = config.attention, config.embed
        q_width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.q = param((q_width, embed), ("q_heads", "embed"), "attention.q")
        self.k = param((kv_width, embed), ("kv_heads", "embed"), "attention.k")
        self.v = param((kv_width, embed), ("kv_heads", "embed"), "attention.v")
        self.o = param((embed, q_width), ("attention_out", "heads_in"), "attention.o")
        if cfg.bias:
            self.q_bias = param((q_width,), ("q_heads",), "attention.bias")
            self.k_bias = param((kv_width,), ("kv_heads",), "attention.bias")
            self.v_bias = param((kv_width,), ("kv_heads",), "attention.bias")
        if cfg.out_bias:
            self.o_bias = param((embed,), ("attention_out",), "attention.bias")
        if cfg.sinks:
            self.sinks = param((cfg.heads,), ("q_heads",), "attention.sinks", float32=True)
        if cfg.qk_norm == "flat":
            self.q_norm = RMSNorm(q_width, "heads_in", config.norm_eps, param, "attention.norm")
            self.k_norm = RMSNorm(kv_width, "heads_in", config.norm_eps, param, "attention.norm")
        elif cfg.qk_norm != "none":
            self.q_norm = RMSNorm(cfg.head_dim, "head_dim", config.norm_eps, param, "attention.norm")
            self.k_norm = RMSNorm(cfg.head_dim, "head_dim", config.norm_eps, param, "attention.norm")

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        pages: Pages,
        batch: StepBatch,
        rope: RopeTables,
        *,
        layer: jax.Array | int,
        cache_layer: jax.Array | int,
        layout: Layout,
        parallel: ParallelContext,
    ) -> tuple[Float[Array, "tokens embed"], Pages]:
        """Writes this step's keys and values, then attends.

        Args:
            x: normalised residual stream.
            pages: cache of this device.
            batch: positions and pages of the new tokens.
            rope: cosine and sine of each token's position.
            layer: index into the weight stack.
            cache_layer: index into the cache.
            layout: shape of the step.
            parallel: mesh axes.
        """
        cfg = self.config
        tokens = x.shape[0]
        q, k, v = self._project(x, layer, parallel)
        if cfg.qk_norm == "before_rope":
            q, k = self.q_norm(q, layer), self.k_norm(k, layer)
        q = rotate(q, *rope, interleaved=cfg.rope.interleaved)
        k = rotate(k, *rope, interleaved=cfg.rope.interleaved)
        if cfg.qk_norm == "after_rope":
            q, k = self.q_norm(q, layer), self.k_norm(k, layer)
        with jax.named_scope("kv_write"):
            keys = kv_write(pages["k"], k, batch.page_ids, batch.slots, layer=cache_layer)
            values = kv_write(pages["v"], v, batch.page_ids, batch.slots, layer=cache_layer)
        with jax.named_scope("attention"):
            out = attention(
                q.reshape(layout.rows, layout.chunk, *q.shape[1:]),
                keys,
                values,
                batch.page_table,
                batch.positions.reshape(layout.rows, layout.chunk),
                layer=cache_layer,
                scale=cfg.head_dim**-0.5,
                window=jnp.asarray(cfg.windows, jnp.int32)[cache_layer] if cfg.windows else None,
                sinks=self.sinks[...][layer] if cfg.sinks else None,
            )
        out = tap(gather_columns(out.reshape(tokens, -1), parallel.head_axes), "attention.o.in")
        out = linear(out, self.o[...], layer=layer, bias=self.o_bias[...] if cfg.out_bias else None)
        return gather_columns(out, parallel.head_axes), {**pages, "k": keys, "v": values}

    def _project(
        self, x: Float[Array, "tokens embed"], layer: jax.Array | int, parallel: ParallelContext
    ) -> tuple[jax.Array, ...]:
        """Queries, keys and values [tokens, heads of this device, head_dim]."""
        cfg = self.config
        biases = (self.q_bias[...], self.k_bias[...], self.v_bias[...]) if cfg.bias else (None, None, None)
        q = linear(x, self.q[...], layer=layer, bias=biases[0])
        k = linear(x, self.k[...], layer=layer, bias=biases[1])
        v = linear(x, self.v[...], layer=layer, bias=biases[2])
        if cfg.qk_norm == "flat":
            q = _norm_of_all(self.q_norm, q, layer, parallel)
            k = _norm_of_all(self.k_norm, k, layer, parallel)
        tokens = x.shape[0]
        return tuple(part.reshape(tokens, -1, cfg.head_dim) for part in (q, k, v))


def _norm_of_all(
    norm: RMSNorm, x: Float[Array, "tokens part"], layer: jax.Array | int, parallel: ParallelContext
) -> Float[Array, "tokens part"]:
    """This device's part of the norm over the heads of all devices."""
    part = x.shape[1]
    whole = norm(gather_columns(x, parallel.head_axes), layer)
    return jax.lax.dynamic_slice_in_dim(whole, rank_index(parallel.head_axes) * part, part, axis=1)
