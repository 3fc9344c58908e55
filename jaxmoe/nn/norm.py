"""Norms with their weights in a stack or alone."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxmoe.nn.param import ParamFactory, Role
from jaxmoe.ops.norm import layer_norm, rms_norm


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


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, float32 inside; its parameters stay float32."""

    def __init__(self, width: int, axis: str, eps: float, param: ParamFactory, role: Role = "norm"):
        """Declares gain and bias [width]."""
        self.eps = eps
        self.weight = param((width,), (axis,), role, float32=True)
        self.bias = param((width,), (axis,), role, float32=True)

    def __call__(self, x: Float[Array, "*lead width"], layer: jax.Array | int) -> jax.Array:
        """Normalises x with the parameters of a layer of the stack."""
        return layer_norm(x, self.weight[...][layer], self.bias[...][layer], eps=self.eps)
