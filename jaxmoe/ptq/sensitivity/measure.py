"""What a scheme costs a linear layer, an expert, a layer or the cache, through the operators that serve."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxmoe.nn.block import HalfState
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.ops.experts import Activation
from jaxmoe.ops.linear import linear
from jaxmoe.ptq.layer_forward import forward_layer
from jaxmoe.ptq.sensitivity.spread import Spread, spread_of
from jaxmoe.quant.int8 import dequantize_slices, quantize_slices
from jaxmoe.quant.qarray import Weight, quantize_weight
from jaxmoe.quant.scheme import Scheme

Schemes = tuple[Scheme, ...]
SIDES = ("noise", "signal")
"""What the last axis of all errors holds: sum of squares of the error, and of the float result."""


@partial(jax.jit, static_argnums=2)
def linear_errors(
    x: Float32[Array, "tokens in"], weight: Float32[Array, "out in"], schemes: Schemes
) -> Float32[Array, "schemes 2"]:
    """(noise, signal) of a linear layer's output under each scheme, every token scaled to unit length.

    Integers with one scale a token do not mind the scaling, and tokens count alike: a few that are a thousand times
    larger than the rest would be all that is measured. Tokens of zeros count for nothing.
    """
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    unit = jnp.where(norm > 0, x / jnp.where(norm > 0, norm, jnp.float32(1)), jnp.float32(0))
    exact = linear(unit, weight)
    return jnp.stack([_sides(linear(unit, quantize_weight(weight, scheme)), exact) for scheme in schemes])


@partial(jax.jit, static_argnums=(3, 4))
def expert_errors(
    weights: dict[str, jax.Array],
    rows: Float32[Array, "tokens embed"],
    share: Float32[Array, " tokens"],
    activation: Activation,
    schemes: Schemes,
) -> dict[str, Any]:
    """What the schemes cost an expert, and how its projections' inputs are spread.

    Args:
        weights: gate, up, down and perhaps biases in float32.
        rows: the expert's tokens, zeros at the end.
        share: how much of what it makes of each token enters the residual stream; 0 where there is none.
        activation: between the projections.
        schemes: candidates.
    """
    real = share != 0
    hidden = activation(
        linear(rows, weights["gate"], bias=weights.get("gate_bias")),
        linear(rows, weights["up"], bias=weights.get("up_bias")),
    )
    hidden = jnp.where(real[:, None], hidden, jnp.float32(0))
    inputs = {"gate": rows, "up": rows, "down": hidden}
    exact = _expert(weights, rows, activation)
    factor = share[:, None]
    block = []
    for scheme in schemes:
        quantised = {**weights, **{name: quantize_weight(weights[name], scheme) for name in inputs}}
        block.append(_sides(_expert(quantised, rows, activation) * factor, exact * factor))
    return {
        "linear": jnp.stack([linear_errors(x, weights[name], schemes) for name, x in inputs.items()]),
        "block": jnp.stack(block),
        "spreads": {"in": spread_of(rows, real), "hidden": spread_of(hidden, real)},
    }


@partial(jax.jit, static_argnums=(0, 1, 2, 7))
def watch_layer(
    config: DecoderConfig,
    width: int,
    names: tuple[str, ...],
    weights: Mapping[str, Weight],
    x: jax.Array,
    length: jax.Array,
    selected: jax.Array | None,
    kept_rows: int,
) -> tuple[dict[str, jax.Array], jax.Array | None, dict[str, tuple[Spread, jax.Array]], dict[str, jax.Array], Any]:
    """One float forward of a sample: fields of `Attended`, its choice of keys, and by tap the spread and some rows.

    The last result is (noise, signal) of INT8 storage, by table of the cache.

    Args:
        config: see `forward_layer`, as `width`, `weights`, `x`, `length` and `selected`.
        width: likewise.
        names: taps to watch.
        weights: likewise.
        x: likewise.
        length: likewise.
        selected: likewise.
        kept_rows: rows of each tap to keep, evenly spaced; if the sample has fewer tokens, some come twice.
    """
    seen = forward_layer(config, width, dict(weights), x, length, selected)
    places = (jnp.arange(kept_rows, dtype=jnp.int32) * length) // kept_rows
    spreads = {name: spread_of(seen.taps[name], seen.real) for name in names}
    rows = {name: seen.taps[name][places].astype(jnp.float32) for name in names}
    cache = {name: cache_error(values) for name, values in seen.cache.items()}
    return seen.results, seen.selected, spreads, rows, cache


@partial(jax.jit, static_argnums=(0, 1))
def layer_results(
    config: DecoderConfig,
    width: int,
    weights: Mapping[str, Weight],
    x: jax.Array,
    length: jax.Array,
    selected: jax.Array | None,
) -> dict[str, jax.Array]:
    """What a layer makes of a sample, zeros at its padding: see `forward_layer`, whose arguments these are."""
    seen = forward_layer(config, width, dict(weights), x, length, selected)
    return {name: _masked(array, seen.real) for name, array in seen.results.items()}


@jax.jit
def layer_errors(results: dict[str, jax.Array], exact: dict[str, jax.Array], length: jax.Array) -> dict[str, jax.Array]:
    """A sample's (noise, signal), and its (same, chosen) experts if there are any.

    The error is that of the stream that leaves, with the shared expert's part; routed experts have no part in it.

    Args:
        results: of the layer with integer weights.
        exact: with float weights.
        length: tokens of the sample.
    """
    sides = {"sides": _sides(_leaving(results), _leaving(exact))}
    if "ids" not in exact:
        return sides
    same = jnp.any(exact["ids"][:, :, None] == results["ids"][:, None, :], axis=-1)
    real = jnp.arange(same.shape[0], dtype=jnp.int32) < length
    agreeing = jnp.sum((same & real[:, None]).astype(jnp.int32))
    return {**sides, "routing": jnp.stack([agreeing, length * same.shape[1]])}


def quantised_weights(weights: Mapping[str, Any], chosen: frozenset[str], scheme: Scheme) -> dict[str, Weight]:
    """A layer's weights with the chosen ones rounded to nearest."""
    return {name: _round(array, scheme) if name in chosen else array for name, array in weights.items()}


def cache_error(values: Float[Array, "tokens heads width"]) -> Float32[Array, "2"]:
    """(noise, signal) of keys, values or latents kept in INT8 with one scale for each token and head."""
    values = values.astype(jnp.float32)
    return _sides(dequantize_slices(*quantize_slices(values)), values)


_round = jax.jit(quantize_weight, static_argnums=1)


def _expert(weights: Mapping[str, Any], rows: jax.Array, activation: Activation) -> jax.Array:
    gate = linear(rows, weights["gate"], bias=weights.get("gate_bias"))
    up = linear(rows, weights["up"], bias=weights.get("up_bias"))
    return linear(activation(gate, up), weights["down"], bias=weights.get("down_bias"))


def _sides(result: jax.Array, exact: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sum(jnp.square(result - exact)), jnp.sum(jnp.square(exact))])


def _leaving(half: dict[str, jax.Array]) -> jax.Array:
    """The residual stream, or streams, after a layer without its routed experts."""
    stream = half["stream"]
    if "shared" not in half:
        return stream
    whole = HalfState(stream=stream, gates=half.get("gates"), pages={}, selected=None)
    return whole.join(half["shared"].astype(stream.dtype))


def _masked(values: jax.Array, real: jax.Array) -> jax.Array:
    shape = (-1,) + (1,) * (values.ndim - 1)
    return jnp.where(real.reshape(shape), values, jnp.zeros((), values.dtype))
