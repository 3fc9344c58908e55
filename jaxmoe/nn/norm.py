"""RMSNorm with its weight in a stack or alone."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.nn.param import ParamFactory, Role
from jaxmoe.ops.norm import rms_norm


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, float32 inside."""

    def __init__(self, width: int, axis: str, eps: float, param: ParamFactory, role: Role = "norm"):
        """Declares the gain [width]."""
        self.eps = eps
        self.weight = param((width,), (axis,), role)

    def __call__(self, x: Float[Array, "*lead width"], layer: jax.Array | int | None = None) -> jax.Array:
        """Normalises x; `layer` picks the gain of a stack."""
        weight = self.weight[...]
        return rms_norm(x, weight if layer is None else weight[layer], eps=self.eps)
