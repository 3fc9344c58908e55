"""Token embedding and output head, split over the vocabulary where the plan says so."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.param import ParamFactory
from jaxmoe.ops.linear import linear
from jaxmoe.parallel.exchange import ParallelContext, rank_index


class Embedding(nnx.Module):
    """Rows of the vocabulary. Invariant: a device holds rows rank * part .. (rank + 1) * part - 1."""

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares the table [vocab, embed]."""
        self.weight = param((config.vocab, config.embed), ("vocab", "embed"), "embed")

    def __call__(
        self, token_ids: Int32[Array, " tokens"], parallel: ParallelContext, dtype: jnp.dtype
    ) -> Float[Array, "tokens embed"]:
        """Looks tokens up; ids are in range, checked on the host."""
        table = self.weight[...]
        ids = parallel.gather_rows(token_ids, parallel.vocab_axes) - rank_index(parallel.vocab_axes) * table.shape[0]
        here = (ids >= 0) & (ids < table.shape[0])
        rows = jnp.where(here[:, None], table[jnp.where(here, ids, 0)], jnp.zeros((), table.dtype))
        return parallel.reduce_rows(rows.astype(dtype), parallel.vocab_axes)


class Head(nnx.Module):
    """Output projection of its own; tied models use the embedding's table instead."""

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares the weight [vocab, embed]."""
        self.weight = param((config.vocab, config.embed), ("vocab", "embed"), "head")


def logits(
    hidden: Float[Array, "rows embed"], weight: jax.Array, vocab: int, parallel: ParallelContext
) -> Float32[Array, "rows vocab"]:
    """Scores of all tokens for this device's rows, in float32; padded vocabulary rows are cut off."""
    everyone = parallel.gather_rows(hidden, parallel.vocab_axes)
    part = linear(everyone.astype(jnp.float32), weight)
    return parallel.columns_to_rows(part, parallel.vocab_axes)[:, :vocab]
