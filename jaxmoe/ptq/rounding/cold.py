"""Experts that few tokens reached: whose statistics their weights are rounded by."""

from collections.abc import Sequence
from typing import Final, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxmoe.errors import RecipeError

ColdPolicy = Literal["shrink", "rtn", "all_tokens", "error"]
"""What a recipe says about experts with fewer tokens than it asks for."""

COLD_POLICIES: Final[dict[ColdPolicy, str]] = {
    "shrink": "every expert leans on the layer's mean, the more the fewer tokens it saw; no threshold",
    "rtn": "a cold expert is rounded to nearest",
    "all_tokens": "a cold expert uses the mean over all tokens of the layer",
    "error": "a cold expert is refused",
}

StatisticsOf = Literal["shrunk", "own", "layer", "none"]
"""Whose statistics an expert gets. none: all zero, which every method rounds to nearest."""


def decide(policy: ColdPolicy, counts: Sequence[int], min_tokens: int, *, where: str) -> tuple[StatisticsOf, ...]:
    """The decision for each expert.

    Args:
        policy: see `COLD_POLICIES`.
        counts: tokens that reached each expert.
        min_tokens: an expert with fewer is cold.
        where: layer and projection, for the message.

    Raises:
        RecipeError: policy 'error' and a cold expert.
    """
    if policy == "shrink":
        return ("shrunk",) * len(counts)
    cold = [index for index, count in enumerate(counts) if count < min_tokens]
    if policy == "error" and cold:
        shown = ", ".join(f"expert {index}: {counts[index]}" for index in cold[:8])
        raise RecipeError(
            f"{where}: {len(cold)} of {len(counts)} experts saw fewer than {min_tokens} calibration tokens "
            f"({shown}{', ...' if len(cold) > 8 else ''}); calibrate with more text or use cold_expert = 'shrink'"
        )
    instead: StatisticsOf = "none" if policy == "rtn" else "layer"
    return tuple(instead if count < min_tokens else "own" for count in counts)


def shrink(
    own: Float32[Array, "*shape"],
    own_count: Int32[Array, "*lead"],
    layer_mean: Float32[Array, "*statistic"],
    in_size: int,
) -> Float32[Array, "*shape"]:
    """`r * own / own_count + (1 - r) * layer_mean` with `r = own_count / (own_count + in_size)`.

    As if `in_size` tokens of the layer's kind had been seen beside the expert's own, so that it is defined for none.

    Args:
        own: sum over the expert's tokens of x**2 [*lead, in] or x x^T [*lead, in, in].
        own_count: number of those tokens.
        layer_mean: mean of the same over all tokens of the layer's experts, [in] or [in, in].
        in_size: width of the input.
    """
    prior = np.float32(in_size)
    return (own + prior * _aligned(layer_mean, own)) / (_counts(own_count, own) + prior)


def statistics(
    own: Float32[Array, "experts *statistic"],
    own_count: Int32[Array, " experts"],
    layer_mean: Float32[Array, "*statistic"],
    decisions: Sequence[StatisticsOf],
) -> Float32[Array, "experts *statistic"]:
    """The mean statistics that each expert is rounded by, after `decide`; arguments as in `shrink`."""
    count = _counts(own_count, own)

    def decided(kind: StatisticsOf) -> Array:
        return _counts(jnp.asarray([decision == kind for decision in decisions]), own) > 0

    mean = own / jnp.maximum(count, np.float32(1))
    mean = jnp.where(decided("shrunk"), shrink(own, own_count, layer_mean, own.shape[-1]), mean)
    mean = jnp.where(decided("layer"), _aligned(layer_mean, own), mean)
    return jnp.where(decided("none"), np.float32(0), mean)


def _counts(counts: Array, statistic: Array) -> Array:
    """A number per expert in float32, with as many axes as the statistic."""
    return counts.astype(jnp.float32).reshape(*counts.shape, *[1] * (statistic.ndim - counts.ndim))


def _aligned(mean: Array, statistic: Array) -> Array:
    return mean.reshape(*[1] * (statistic.ndim - mean.ndim), *mean.shape)
