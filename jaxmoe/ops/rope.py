"""Rotary position embedding: frequencies on the host, one cosine and sine table a step, rotation of halves."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


def inverse_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """[rotary_dim / 2] float32: theta ** (-2i / rotary_dim). Source: Su et al. 2021, equation 15."""
    return (1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)).astype(np.float32)


def cos_sin(
    positions: Int32[Array, " tokens"], frequencies: np.ndarray
) -> tuple[Float32[Array, "tokens half"], Float32[Array, "tokens half"]]:
    """Cosine and sine of position times frequency, once a step for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate_half(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates the first 2 * half dims of each head, dim i paired with dim i + half; the rest passes (partial RoPE)."""
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
