"""Residual connections: one stream that is added to, or several that are read and written through learned gates.

Independent hyper-connections (Hy4): no mixing between streams, no normalisation of the mixing matrix. Source: the
released model's deployment in vLLM and transformers models/hy_v4 (5.24.0).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32
from numpy import float32

from jaxmoe.nn.config import DecoderConfig, HyperConfig
from jaxmoe.nn.param import ParamFactory
from jaxmoe.ops.linear import linear


def _gates(
    streams: Float[Array, "tokens streams embed"], fn: jax.Array, eps: float, layer: jax.Array | int | None
) -> Float32[Array, "tokens gates"]:
    """fn applied to all streams side by side, divided by their root mean square."""
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + float32(eps))
    return linear(flat, fn, layer=layer) * inverse


class HyperConnection(nnx.Module):
    """Gates of one sub-block: `pre` mixes the streams into its input, `post` adds its output to each stream."""

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares fn [2 * streams, streams * embed], base and scale, all float32."""
        assert config.hyper is not None
        self.config: HyperConfig = config.hyper
        self.norm_eps = config.norm_eps
        count = 2 * self.config.streams
        width = self.config.streams * config.embed
        self.fn = param((count, width), ("streams", "streams"), "hyper", float32=True)
        self.base = param((count,), ("streams",), "hyper", float32=True)
        self.scale = param((2,), ("streams",), "hyper", float32=True)

    def __call__(
        self, streams: Float[Array, "tokens streams embed"], layer: jax.Array | int
    ) -> tuple[Float[Array, "tokens embed"], Float32[Array, "tokens streams"]]:
        """The sub-block's input, and the gates for `write`."""
        cfg = self.config
        gates = _gates(streams, self.fn[...], self.norm_eps, layer)
        base, scale = self.base[...][layer], self.scale[...][layer]
        count, eps = cfg.streams, float32(cfg.epsilon)
        pre = jax.nn.sigmoid(gates[:, :count] * scale[0] + base[None, :count]) + eps
        post = float32(cfg.magnitude) * jax.nn.sigmoid(gates[:, count:] * scale[1] + base[None, count:]) + eps
        return _mix(streams, pre), post


class HyperHead(nnx.Module):
    """Mixes the streams into the one vector that the final norm takes."""

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares fn [streams, streams * embed], base and scale, all float32."""
        assert config.hyper is not None
        self.config: HyperConfig = config.hyper
        self.norm_eps = config.norm_eps
        count = self.config.streams
        self.fn = param((count, count * config.embed), ("streams", "streams"), "hyper", float32=True)
        self.base = param((count,), ("streams",), "hyper", float32=True)
        self.scale = param((1,), ("streams",), "hyper", float32=True)

    def __call__(self, streams: Float[Array, "tokens streams embed"]) -> Float[Array, "tokens embed"]:
        """The mixed vector."""
        gates = _gates(streams, self.fn[...], self.norm_eps, None)
        pre = jax.nn.sigmoid(gates * self.scale[...][0] + self.base[...][None, :]) + float32(self.config.epsilon)
        return _mix(streams, pre)


def _mix(
    streams: Float[Array, "tokens streams embed"], gates: Float32[Array, "tokens streams"]
) -> Float[Array, "tokens embed"]:
    """Sum of the streams times their gates, in float32."""
    return jnp.sum(gates[:, :, None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)


def write(
    streams: Float[Array, "tokens streams embed"],
    output: Float[Array, "tokens embed"],
    gates: Float32[Array, "tokens streams"],
) -> Float[Array, "tokens streams embed"]:
    """Adds a sub-block's output to every stream."""
    added = gates[:, :, None] * output.astype(jnp.float32)[:, None, :]
    return (streams.astype(jnp.float32) + added).astype(streams.dtype)
