"""Rotary position embedding: frequencies on the host, one cosine and sine table a step, rotation of pairs."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


def inverse_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """[rotary_dim / 2] float32: theta ** (-2i / rotary_dim). Source: Su et al. 2021, equation 15."""
    return (1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)).astype(np.float32)


def yarn_frequencies(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    original_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """[rotary_dim / 2] float32: fast dims as they are, slow dims divided by `factor`, a linear ramp between them.

    Args:
        rotary_dim: dims that rotate.
        theta: base.
        factor: stretch of the context.
        original_positions: context the model was first trained with.
        beta_fast: dims that turn more often than this over that context stay as they are.
        beta_slow: dims that turn less often than this are divided.
        truncate: whether the ramp's ends are rounded outwards to whole dims.

    Source: Peng et al. 2023 (arXiv 2309.00071), equations 19 to 23.
    """

    def dim_of(turns: float) -> float:
        return rotary_dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # an infinitely steep ramp
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    plain = 1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    return (plain * (1 - ramp) + plain / factor * ramp).astype(np.float32)


def cos_sin(
    positions: Int32[Array, " tokens"], frequencies: np.ndarray, factor: float = 1.0
) -> tuple[Float32[Array, "tokens half"], Float32[Array, "tokens half"]]:
    """Cosine and sine of position times frequency, times `factor`; once a step for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    if factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * np.float32(factor), jnp.sin(angles) * np.float32(factor)


def rotate(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates the first 2 * half dims of each head; the rest passes (partial RoPE).

    Args:
        x: heads.
        cos: cosines.
        sin: sines.
        interleaved: dims 2i and 2i + 1 form a pair; otherwise dims i and i + half. Dims keep their places.
    """
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        pairs = turning.reshape(*x.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = turned.reshape(turning.shape).astype(x.dtype)
    else:
        first, second = turning[..., :half], turning[..., half:]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
