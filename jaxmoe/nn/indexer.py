"""The indexer of sparse attention: one stack of weights for the layers that have one of their own.

Source: DeepSeek-V3.2 technical report, section 2.1; the sharing between layers: arXiv 2603.12201.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxmoe.nn.config import DecoderConfig, IndexerConfig, LatentAttentionConfig
from jaxmoe.nn.norm import LayerNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.rotary import RopeTables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.index_select import index_select
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.linear import linear
from jaxmoe.ops.pages import Pages
from jaxmoe.ops.rope import rotate


class Indexer(nnx.Module):
    """Index queries from the query latent, one index key a token, head weights in float32.

    Computed alike on all devices that share rows: splitting its heads would move float sums, and with them the choice.
    """

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares the projections of the layers in `full_layers`."""
        attention = config.attention
        assert isinstance(attention, LatentAttentionConfig) and attention.indexer is not None
        self.config = cfg = attention.indexer
        self.rope_dim = attention.rope_dim
        self.layers = config.layers
        width, q_width = cfg.heads * cfg.head_dim, attention.q_lora or config.embed
        self.q = param((width, q_width), ("index_heads", "q_lora"), "indexer.q")
        self.k = param((cfg.head_dim, config.embed), ("index_heads", "embed"), "indexer.k")
        self.k_norm = LayerNorm(cfg.head_dim, "head_dim", cfg.norm_eps, param, "indexer.norm")
        self.weights = param((cfg.heads, config.embed), ("index_heads", "embed"), "indexer.weights", float32=True)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        q_latent: Float[Array, "tokens q_lora"],
        pages: Pages,
        batch: StepBatch,
        rope: RopeTables,
        selected: Int32[Array, "rows chunk k"] | None,
        *,
        layer_number: jax.Array | int,
        layout: Layout,
    ) -> tuple[Pages, Int32[Array, "rows chunk k"] | None]:
        """Writes index keys and chooses keys on a full layer; passes the former choice on a shared one.

        Args:
            x: normalised residual stream.
            q_latent: query latent after its norm.
            pages: cache of this device.
            batch: positions and pages of the new tokens.
            rope: the main attention's cosines and sines.
            selected: the former choice; None on every layer when the cache cannot hold more keys than may be chosen.
            layer_number: number of the layer in the model, traced.
            layout: shape of the step.
        """
        cfg, table = self.config, pages["index"]
        ranks = _ranks(cfg, self.layers)
        rank = jnp.asarray(np.maximum(ranks, 0))[layer_number]
        full = jnp.asarray(ranks >= 0)[layer_number]
        every = len(cfg.full_layers) == self.layers

        def key() -> jax.Array:
            raw = self.k_norm(linear(x, self.k[...], layer=rank), rank)
            return self._rotate(raw[:, None], rope)

        def nothing() -> jax.Array:
            return jnp.zeros((x.shape[0], 1, cfg.head_dim), x.dtype)

        keys = key() if every else lax.cond(full, key, nothing)
        page_ids = batch.page_ids if every else jnp.where(full, batch.page_ids, table.num_pages)
        table = kv_write(table, keys, page_ids, batch.slots, layer=rank)
        pages = {**pages, "index": table}
        if selected is None:
            return pages, None

        def choose() -> jax.Array:
            q = linear(q_latent, self.q[...], layer=rank).reshape(x.shape[0], cfg.heads, cfg.head_dim)
            weights = linear(x.astype(jnp.float32), self.weights[...], layer=rank)
            weights = weights * np.float32(cfg.heads**-0.5 * cfg.head_dim**-0.5)
            return index_select(
                self._rotate(q, rope).reshape(layout.rows, layout.chunk, cfg.heads, cfg.head_dim),
                weights.reshape(layout.rows, layout.chunk, cfg.heads),
                table,
                batch.page_table,
                batch.positions.reshape(layout.rows, layout.chunk),
                layer=rank,
                top_k=cfg.top_k,
            )

        return pages, choose() if every else lax.cond(full, choose, lambda: selected)

    def no_choice(self, pages: Pages, batch: StepBatch, layout: Layout) -> Int32[Array, "rows chunk k"] | None:
        """What the first layer is handed: an empty choice, or None when no sequence can have more keys than top_k."""
        capacity = batch.page_table.shape[1] * pages["index"].page_size
        if capacity <= self.config.top_k:
            return None
        return jnp.full((layout.rows, layout.chunk, self.config.top_k), -1, jnp.int32)

    def _rotate(self, x: Float[Array, "tokens heads width"], rope: RopeTables) -> Float[Array, "tokens heads width"]:
        cfg = self.config
        if not cfg.rotates_last:
            return rotate(x, *rope, interleaved=cfg.interleaved)
        rest = cfg.head_dim - self.rope_dim
        turned = rotate(x[..., rest:], *rope, interleaved=cfg.interleaved)
        return jnp.concatenate([x[..., :rest], turned], axis=-1)


def _ranks(config: IndexerConfig, layers: int) -> np.ndarray:
    """[layers] int32: place of each layer's weights in the stack, -1 for a layer that has none."""
    ranks = np.full(layers, -1, np.int32)
    ranks[list(config.full_layers)] = np.arange(len(config.full_layers), dtype=np.int32)
    return ranks
