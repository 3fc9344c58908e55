"""SwiGLU feed-forward: the dense layers and the shared expert are the same part."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.tap import Tap, tap
from jaxmoe.ops.linear import linear


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)); rows stay on their device."""

    def __init__(self, embed: int, width: int, axis: str, kind: str, param: ParamFactory):
        """Declares the projections; `kind` is 'ffn' or 'shared' and gives the roles."""
        self.down_tap: Tap = "ffn.down.in" if kind == "ffn" else "shared.down.in"
        self.gate = param((width, embed), (axis, "embed"), "ffn.gate" if kind == "ffn" else "shared.gate")
        self.up = param((width, embed), (axis, "embed"), "ffn.up" if kind == "ffn" else "shared.up")
        self.down = param((embed, width), ("embed", axis), "ffn.down" if kind == "ffn" else "shared.down")

    def __call__(self, x: Float[Array, "tokens embed"], layer: jax.Array | int) -> Float[Array, "tokens embed"]:
        """Applies layer `layer` of the stack."""
        gate = linear(x, self.gate[...], layer=layer).astype(jnp.float32)
        up = linear(x, self.up[...], layer=layer).astype(jnp.float32)
        hidden = tap((jax.nn.silu(gate) * up).astype(x.dtype), self.down_tap)
        return linear(hidden, self.down[...], layer=layer)
