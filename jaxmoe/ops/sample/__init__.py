"""sample: the next token of each row, greedy or drawn, independent of the other rows.

Contract
    logits        [rows, vocab] float32.
    temperature   [rows] float32; 0 means greedy (the smallest id among equals).
    top_k         [rows] int32; 0 means all.
    top_p         [rows] float32 in (0, 1]; the smallest set of most likely tokens whose share of the mass that top_k
                  leaves reaches it; 1 keeps all.
    seeds         [rows] uint32 and counters [rows] int32: the draw of a row depends on its own seed and counter only.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32


def _draw(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, seed: jax.Array, counter: jax.Array
) -> jax.Array:
    vocab = logits.shape[-1]
    # Relative to the largest: a tiny temperature then gives 0 and -inf, never inf - inf.
    scaled = (logits - jnp.max(logits)) / jnp.where(temperature > 0, temperature, 1)
    order = jnp.argsort(scaled, descending=True, stable=True)
    keep_count = jnp.where(top_k > 0, top_k, vocab)
    ranked = jnp.where(jnp.arange(vocab) < keep_count, scaled[order], -jnp.inf)
    probs = jax.nn.softmax(ranked)
    before = jnp.cumsum(probs) - probs
    # The rounded sum reaches 1 before the last token of a large vocabulary, so 1 is a case of its own.
    keep = (before < top_p) | (top_p >= 1)
    key = jax.random.fold_in(jax.random.key(seed), counter)
    # Gumbel-max: the argmax of logits plus noise is a draw from their softmax.
    noisy = jnp.where(keep, ranked + jax.random.gumbel(key, (vocab,), jnp.float32), -jnp.inf)
    return order[jnp.argmax(noisy)].astype(jnp.int32)


def sample(
    logits: Float32[Array, "rows vocab"],
    temperature: Float32[Array, " rows"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    seeds: UInt32[Array, " rows"],
    counters: Int32[Array, " rows"],
) -> Int32[Array, " rows"]:
    """The next token of each row; the sort that drawing needs is skipped when every row is greedy."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = lax.cond(
        jnp.any(temperature > 0),
        lambda: jax.vmap(_draw)(logits, temperature, top_k, top_p, seeds, counters),
        lambda: greedy,
    )
    return jnp.where(temperature > 0, drawn, greedy)
