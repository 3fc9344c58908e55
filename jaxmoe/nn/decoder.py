"""The decoder: embedding, a dense prefix, the mixture-of-experts body, final norm, head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxmoe.nn.block import Block
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.embed import Embedding, Head, logits
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.stack import scan_layers
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.pages import KVPages, fill_pages
from jaxmoe.ops.rope import cos_sin, inverse_frequencies
from jaxmoe.parallel.exchange import ParallelContext


class Decoder(nnx.Module):
    """A whole model; called inside shard_map with one device's part of everything."""

    def __init__(self, config: DecoderConfig):
        """Declares all parameters; build it under `nnx.eval_shape`."""
        self.config = config
        param = ParamFactory()
        self.embed = Embedding(config, param)
        if config.dense_layers:
            self.dense = Block(config, layers=config.dense_layers, moe=False)
        self.moe = Block(config, layers=config.moe_layers, moe=True)
        self.norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        if not config.tied_head:
            self.head = Head(config, param)

    def __call__(
        self,
        batch: StepBatch,
        pages: KVPages,
        *,
        layout: Layout,
        parallel: ParallelContext,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "tokens embed"], KVPages, Int32[Array, "moe_layers tokens top_k"]]:
        """Runs the blocks on this step's new tokens.

        Returns:
            The final residual stream before the last norm, the cache with the new keys and values, and the experts
            each token chose in each layer.
        """
        rope = self.config.attention.rope
        # Zeroing comes before any write of this step: a recycled page never shows its former owner's keys.
        pages = fill_pages(pages, batch.zero_pages)
        tables = cos_sin(jnp.maximum(batch.positions, 0), inverse_frequencies(rope.rotary_dim, rope.theta))
        x = self.embed(batch.token_ids, parallel, dtype)

        def run(
            block: Block, first_layer: int, x: jax.Array, pages: KVPages
        ) -> tuple[jax.Array, KVPages, jax.Array | None]:
            def body(
                carry: tuple[jax.Array, KVPages], layer: jax.Array
            ) -> tuple[tuple[jax.Array, KVPages], jax.Array | None]:
                x, pages, ids = block(
                    *carry, batch, tables, layer=layer, first_layer=first_layer, layout=layout, parallel=parallel
                )
                return (x, pages), ids

            (x, pages), ids = scan_layers(body, (x, pages), block.layers)
            return x, pages, ids

        if self.config.dense_layers:
            x, pages, _ = run(self.dense, 0, x, pages)
        x, pages, ids = run(self.moe, self.config.dense_layers, x, pages)
        assert ids is not None, "blocks with experts return the chosen ids"
        return x, pages, ids

    def logits(self, hidden: Float[Array, "rows embed"], parallel: ParallelContext) -> Float32[Array, "rows vocab"]:
        """Scores of all tokens for the given rows of the final residual stream."""
        weight = self.embed.weight[...] if self.config.tied_head else self.head.weight[...]
        return logits(self.norm(hidden), weight, self.config.vocab, parallel)
