"""Hyper-connections against the released model's formula in float64, one token and stream at a time."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmoe.nn.config import DecoderConfig, HyperConfig
from jaxmoe.nn.hyper import HyperConnection, HyperHead, write
from jaxmoe.nn.param import ParamFactory
from tests import tiny
from tests.tolerances import TOLERANCES

TOKENS, STREAMS, EMBED, LAYERS = 5, 4, 24, 3
HYPER = HyperConfig(streams=STREAMS, magnitude=2.0, epsilon=1e-3)

dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def config_of(hyper: HyperConfig = HYPER) -> DecoderConfig:
    config = tiny.manifest_of(tiny.CONFIGS["glm4_moe"]).config
    return dataclasses.replace(config, hyper=hyper, embed=EMBED)


def filled(module: Any, seed: int) -> dict[str, np.ndarray]:
    """Draws all parameters of a module in place; returns them in float64."""
    generator, drawn = np.random.default_rng(seed), {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        assert variable.get_metadata()["float32"], "gates are float32 whatever the model's dtype"
        value = generator.normal(size=variable.get_value().shape).astype(np.float32)
        value = value / np.float32(np.sqrt(value.shape[-1])) if path[0] == "fn" else value
        getattr(module, str(path[0]))[...] = jnp.asarray(value)
        drawn[str(path[0])] = value.astype(np.float64)
    return drawn


@cache
def connection() -> tuple[HyperConnection, dict[str, np.ndarray]]:
    module = HyperConnection(config_of(), ParamFactory(layers=LAYERS))
    return module, filled(module, 1)


@cache
def head() -> tuple[HyperHead, dict[str, np.ndarray]]:
    module = HyperHead(config_of(), ParamFactory())
    return module, filled(module, 2)


def streams_of(dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(TOKENS, STREAMS, EMBED)).astype(dtype)


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def gate_logits(streams: np.ndarray, fn: np.ndarray, eps: float) -> np.ndarray:
    """[gates] of one token [streams, embed]: fn times all streams side by side, over their root mean square."""
    flat = streams.reshape(-1)
    return fn @ flat / np.sqrt(np.mean(flat**2) + eps)


def oracle(streams: np.ndarray, weights: dict[str, np.ndarray], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The sub-block's input [tokens, embed] and the gates [tokens, streams] of its output."""
    fn, base, scale = (weights[name][layer] for name in ("fn", "base", "scale"))
    mixed, post = np.zeros((TOKENS, EMBED)), np.zeros((TOKENS, STREAMS))
    for token, wide in enumerate(streams.astype(np.float64)):
        gates = gate_logits(wide, fn, config_of().norm_eps)
        for stream in range(STREAMS):
            pre = sigmoid(gates[stream] * scale[0] + base[stream]) + HYPER.epsilon
            mixed[token] += pre * wide[stream]
            out = gates[STREAMS + stream] * scale[1] + base[STREAMS + stream]
            post[token, stream] = HYPER.magnitude * sigmoid(out) + HYPER.epsilon
    return mixed, post


def head_oracle(streams: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    mixed = np.zeros((TOKENS, EMBED))
    for token, wide in enumerate(streams.astype(np.float64)):
        gates = gate_logits(wide, weights["fn"], config_of().norm_eps)
        for stream in range(STREAMS):
            pre = sigmoid(gates[stream] * weights["scale"][0] + weights["base"][stream]) + HYPER.epsilon
            mixed[token] += pre * wide[stream]
    return mixed


def assert_close(out: jax.Array, expected: np.ndarray) -> None:
    """A bfloat16 result may be one ulp off."""
    slack = 0.0 if out.dtype == jnp.float32 else TOLERANCES["bfloat16_ulp"].value * np.abs(expected)
    assert (np.abs(np.asarray(out, np.float64) - expected) <= TOLERANCES["hyper"].value + slack).all()


@dtypes
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_connection_mixes_and_gates_with_its_layers_weights(layer: int, dtype: Any) -> None:
    module, weights = connection()
    streams = streams_of(dtype)
    mixed, post = jax.jit(module)(jnp.asarray(streams), jnp.int32(layer))
    expected_mixed, expected_post = oracle(streams, weights, layer)
    assert mixed.dtype == dtype and post.dtype == jnp.float32
    assert_close(mixed, expected_mixed)
    assert_close(post, expected_post)


@dtypes
def test_the_head_mixes_into_one_vector(dtype: Any) -> None:
    module, weights = head()
    streams = streams_of(dtype)
    out = jax.jit(module)(jnp.asarray(streams))
    assert out.dtype == dtype and out.shape == (TOKENS, EMBED)
    assert_close(out, head_oracle(streams, weights))


@dtypes
def test_write_adds_to_each_stream_its_share(dtype: Any) -> None:
    streams, output = streams_of(dtype), streams_of(dtype, seed=3)[:, 0]
    gates = np.random.default_rng(4).uniform(0, 2, size=(TOKENS, STREAMS)).astype(np.float32)
    out = jax.jit(write)(jnp.asarray(streams), jnp.asarray(output), jnp.asarray(gates))
    assert out.dtype == dtype and out.shape == streams.shape
    expected = streams.astype(np.float64)
    for token, stream in np.ndindex(gates.shape):
        expected[token, stream] += gates[token, stream].astype(np.float64) * output[token].astype(np.float64)
    assert_close(out, expected)


def test_streams_do_not_mix_but_through_the_sub_block() -> None:
    """Independent: what `write` leaves of a stream is the stream itself."""
    streams = streams_of(np.float32)
    out = write(jnp.asarray(streams), jnp.zeros((TOKENS, EMBED)), jnp.ones((TOKENS, STREAMS)))
    np.testing.assert_array_equal(out, streams)


@pytest.mark.parametrize("factor", [0.125, 64.0])
@pytest.mark.parametrize("part", ["connection", "head"])
def test_gates_do_not_depend_on_the_size_of_the_streams(part: str, factor: float) -> None:
    """Up to the norm's epsilon: streams twice as large give a mix twice as large."""
    module = connection()[0] if part == "connection" else head()[0]

    def mix(streams: np.ndarray) -> np.ndarray:
        array = jnp.asarray(streams)
        return np.asarray(module(array, 1)[0] if isinstance(module, HyperConnection) else module(array))

    streams = 10 * streams_of(np.float32)
    large = mix(np.float32(factor) * streams) / np.float32(factor)
    np.testing.assert_allclose(large, mix(streams), rtol=0, atol=TOLERANCES["hyper_size"].value)


def test_a_token_does_not_see_its_neighbours() -> None:
    (module, _), streams = connection(), streams_of(np.float32)
    damaged = streams.copy()
    damaged[1, 2, 3] = np.nan
    apply: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(module)
    clean, out = apply(jnp.asarray(streams), jnp.int32(0)), apply(jnp.asarray(damaged), jnp.int32(0))
    for before, after in zip(clean, out, strict=True):
        assert np.isnan(np.asarray(after)[1]).all()
        np.testing.assert_array_equal(np.delete(after, 1, axis=0), np.delete(before, 1, axis=0))
