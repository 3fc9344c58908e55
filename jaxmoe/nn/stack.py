"""Equal blocks as one stack: weights keep their [layers, ...] arrays whole, a scan passes only the layer index.

Slicing a stack as scan inputs, or carrying pages as scan outputs, copies all of it each step (measured); indexing
inside the body does not.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def scan_layers(body: Callable[[Carry, jax.Array], tuple[Carry, Any]], carry: Carry, layers: int) -> tuple[Carry, Any]:
    """Runs `body(carry, layer)` for layer 0..layers-1; the second results are stacked."""
    return lax.scan(body, carry, jnp.arange(layers, dtype=jnp.int32))
