"""The decoder: embedding, a dense prefix, the mixture-of-experts body, final norm, head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxmoe.nn.block import Block, State
from jaxmoe.nn.config import DecoderConfig, LatentAttentionConfig
from jaxmoe.nn.embed import Embedding, Head, logits
from jaxmoe.nn.hyper import HyperHead
from jaxmoe.nn.indexer import Indexer
from jaxmoe.nn.mtp import MTP
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.rotary import rope_tables
from jaxmoe.nn.stack import scan_layers
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.pages import Pages, fill_pages
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
        attention = config.attention
        indexer = attention.indexer if isinstance(attention, LatentAttentionConfig) else None
        self.indexer = Indexer(config, ParamFactory(layers=len(indexer.full_layers))) if indexer else None
        if config.hyper is not None:
            self.head_hyper = HyperHead(config, param)
        self.norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        if not config.tied_head:
            self.head = Head(config, param)
        if config.mtp_layers:
            self.mtp = MTP(config)

    def __call__(
        self,
        batch: StepBatch,
        pages: Pages,
        *,
        layout: Layout,
        parallel: ParallelContext,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "tokens embed"], Pages, Int32[Array, "moe_layers tokens top_k"]]:
        """Runs the blocks on this step's new tokens.

        Returns:
            The final residual stream before the last norm, the cache with the new keys and values, and the experts
            each token chose in each layer.
        """
        config = self.config
        # Zeroing comes before any write of this step: a recycled page never shows its former owner's keys.
        pages = fill_pages(pages, batch.zero_pages)
        tables = rope_tables(config.attention.rope, batch.positions)
        x = self.embed(batch.token_ids, parallel, dtype)
        if config.hyper is not None:
            x = jnp.broadcast_to(x[:, None, :], (x.shape[0], config.hyper.streams, x.shape[1]))
        selected = None if self.indexer is None else self.indexer.no_choice(pages, batch, layout)
        state = State(x=x, pages=pages, selected=selected)

        def run(block: Block, first_layer: int, state: State) -> tuple[State, jax.Array | None]:
            def body(state: State, layer: jax.Array) -> tuple[State, jax.Array | None]:
                return block(
                    state,
                    batch,
                    tables,
                    self.indexer,
                    layer=layer,
                    first_layer=first_layer,
                    layout=layout,
                    parallel=parallel,
                )

            return scan_layers(body, state, block.layers)

        if config.dense_layers:
            state, _ = run(self.dense, 0, state)
        state, ids = run(self.moe, config.dense_layers, state)
        assert ids is not None, "blocks with experts return the chosen ids"
        hidden = state.x if config.hyper is None else self.head_hyper(state.x)
        return hidden, state.pages, ids

    def logits(self, hidden: Float[Array, "rows embed"], parallel: ParallelContext) -> Float32[Array, "rows vocab"]:
        """Scores of all tokens for the given rows of the final residual stream."""
        weight = self.embed.weight[...] if self.config.tied_head else self.head.weight[...]
        return logits(self.norm(hidden), weight, self.config.vocab, parallel)
