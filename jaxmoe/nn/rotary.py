"""Cosine and sine tables of a step from a RopeConfig."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxmoe.nn.config import RopeConfig
from jaxmoe.ops.rope import cos_sin, inverse_frequencies, yarn_frequencies

RopeTables = tuple[Float32[Array, "tokens half"], Float32[Array, "tokens half"]]
"""Cosine and sine of each token's position."""


def frequencies(rope: RopeConfig) -> np.ndarray:
    """[rotary_dim / 2] float32."""
    yarn = rope.yarn
    if yarn is None:
        return inverse_frequencies(rope.rotary_dim, rope.theta)
    return yarn_frequencies(
        rope.rotary_dim,
        rope.theta,
        factor=yarn.factor,
        original_positions=yarn.original_positions,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        truncate=yarn.truncate,
    )


def rope_tables(rope: RopeConfig, positions: Int32[Array, " tokens"]) -> RopeTables:
    """Tables of a step; padded tokens (position -1) get those of position 0."""
    factor = 1.0 if rope.yarn is None else rope.yarn.attention_factor
    return cos_sin(jnp.maximum(positions, 0), frequencies(rope), factor)
