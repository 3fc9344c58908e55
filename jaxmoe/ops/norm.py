"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy import float32


def rms_norm(
    x: Float[Array, "*lead width"], weight: Float[Array, " width"], *, eps: float
) -> Float[Array, "*lead width"]:
    """`weight * x / sqrt(mean(x**2) + eps)` along the last axis, in float32, cast to x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + float32(eps))
    return (x32 * inverse * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*lead width"], weight: Float[Array, " width"], bias: Float[Array, " width"], *, eps: float
) -> Float[Array, "*lead width"]:
    """`weight * (x - mean) / sqrt(variance + eps) + bias` along the last axis, in float32, cast to x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + float32(eps))
    shape = (1,) * (x.ndim - 1) + (-1,)
    gain, shift = weight.astype(jnp.float32).reshape(shape), bias.astype(jnp.float32).reshape(shape)
    return (centred * inverse * gain + shift).astype(x.dtype)
