"""Names for activations that a quantiser wants to see; the program that serves is not changed by them."""

from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Tap = Literal["attention.in", "attention.o.in", "ffn.in", "ffn.down.in", "shared.down.in"]
"""Inputs of linear layers: of the attention's projections, of its output, of the feed-forward, of its second half."""


def tap(x: jax.Array, name: Tap) -> jax.Array:
    """x itself, findable by name in a traced program (`ptq.taps`); lowering drops the name."""
    return checkpoint_name(x, name)
