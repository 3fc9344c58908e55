"""Multi-head latent attention on the paged cache. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxmoe.nn.config import DecoderConfig, LatentAttentionConfig
from jaxmoe.nn.indexer import Indexer
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.rotary import RopeTables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.nn.tap import tap
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.latent_attention import latent_attention
from jaxmoe.ops.linear import linear
from jaxmoe.ops.pages import Pages
from jaxmoe.ops.rope import rotate
from jaxmoe.parallel.exchange import ParallelContext, gather_columns


class LatentAttention(nnx.Module):
    """Queries (through a latent or not), one latent and one rotated key a token, optional gate, sinks and indexer.

    The cache holds the latent after its norm and the rotated key, nothing a head. Heads may be split over devices;
    the cache is then whole on each of them.
    """

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares the projections."""
        assert isinstance(config.attention, LatentAttentionConfig)
        self.config = cfg = config.attention
        embed = config.embed
        q_width, v_width = cfg.heads * (cfg.nope_dim + cfg.rope_dim), cfg.heads * cfg.v_dim
        if cfg.q_lora:
            self.q_a = param((cfg.q_lora, embed), ("q_lora", "embed"), "attention.q_a")
            self.q_a_norm = RMSNorm(cfg.q_lora, "q_lora", cfg.norm_eps, param, "attention.norm")
            self.q_b = param((q_width, cfg.q_lora), ("q_heads", "q_lora"), "attention.q_b")
        else:
            self.q = param((q_width, embed), ("q_heads", "embed"), "attention.q")
        self.kv_a = param((cfg.kv_lora + cfg.rope_dim, embed), ("kv_lora", "embed"), "attention.kv_a")
        self.kv_a_norm = RMSNorm(cfg.kv_lora, "kv_lora", cfg.norm_eps, param, "attention.norm")
        kv_width = cfg.heads * (cfg.nope_dim + cfg.v_dim)
        self.kv_b = param((kv_width, cfg.kv_lora), ("q_heads", "kv_lora"), "attention.kv_b")
        self.o = param((embed, v_width), ("attention_out", "heads_in"), "attention.o")
        if cfg.gate:
            self.gate = param((v_width, embed), ("q_heads", "embed"), "attention.gate")
        if cfg.sinks:
            self.sinks = param((cfg.heads,), ("q_heads",), "attention.sinks", float32=True)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        pages: Pages,
        batch: StepBatch,
        rope: RopeTables,
        selected: Int32[Array, "rows chunk k"] | None,
        indexer: Indexer | None,
        *,
        layer: jax.Array | int,
        cache_layer: jax.Array | int,
        layout: Layout,
        parallel: ParallelContext,
    ) -> tuple[Float[Array, "tokens embed"], Pages, Int32[Array, "rows chunk k"] | None]:
        """Writes this step's latents, lets the indexer choose, then attends.

        Args:
            x: normalised residual stream.
            pages: cache of this device.
            batch: positions and pages of the new tokens.
            rope: cosine and sine of each token's position.
            selected: keys that the nearest layer before with an indexer chose; None: no layer has one.
            indexer: of all layers; None: no layer has one.
            layer: index into the weight stack.
            cache_layer: number of the layer, index into the cache.
            layout: shape of the step.
            parallel: mesh axes.

        Returns:
            The layer's output, the cache, and the keys that the next layer may reuse.
        """
        cfg, tokens = self.config, x.shape[0]
        if cfg.q_lora:
            q_latent = self.q_a_norm(linear(x, self.q_a[...], layer=layer), layer)
            q = linear(q_latent, self.q_b[...], layer=layer)
        else:
            q_latent = x
            q = linear(x, self.q[...], layer=layer)
        q = q.reshape(tokens, -1, cfg.nope_dim + cfg.rope_dim)
        q_nope = q[..., : cfg.nope_dim]
        q_rope = rotate(q[..., cfg.nope_dim :], *rope, interleaved=cfg.rope.interleaved)
        kv = linear(x, self.kv_a[...], layer=layer)
        latent = self.kv_a_norm(kv[:, : cfg.kv_lora], layer)
        k_rope = rotate(kv[:, None, cfg.kv_lora :], *rope, interleaved=cfg.rope.interleaved)
        with jax.named_scope("kv_write"):
            where = (batch.page_ids, batch.slots)
            pages = {
                **pages,
                "latent": kv_write(pages["latent"], latent[:, None], *where, layer=cache_layer),
                "rope": kv_write(pages["rope"], k_rope, *where, layer=cache_layer),
            }
        if indexer is not None:
            with jax.named_scope("indexer"):
                pages, selected = indexer(
                    x, q_latent, pages, batch, rope, selected, layer_number=cache_layer, layout=layout
                )
        with jax.named_scope("attention"):
            halves = self.kv_b[...][layer].reshape(-1, cfg.nope_dim + cfg.v_dim, cfg.kv_lora)
            out = latent_attention(
                q_nope.reshape(layout.rows, layout.chunk, *q_nope.shape[1:]),
                q_rope.reshape(layout.rows, layout.chunk, *q_rope.shape[1:]),
                halves[:, : cfg.nope_dim],
                halves[:, cfg.nope_dim :],
                pages["latent"],
                pages["rope"],
                batch.page_table,
                batch.positions.reshape(layout.rows, layout.chunk),
                layer=cache_layer,
                scale=cfg.scale,
                sinks=self.sinks[...][layer] if cfg.sinks else None,
                selected=selected,
            ).reshape(tokens, -1)
        if cfg.gate:
            gate = jax.nn.sigmoid(linear(x, self.gate[...], layer=layer).astype(jnp.float32))
            out = (out.astype(jnp.float32) * gate).astype(x.dtype)
        out = tap(gather_columns(out, parallel.head_axes), "attention.o.in")
        out = linear(out, self.o[...], layer=layer)
        return gather_columns(out, parallel.head_axes), pages, selected
