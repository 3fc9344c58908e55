"""Experts that few tokens reached: whose second moments their weights are rounded by."""

from typing import Final, Literal

import numpy as np

from jaxmoe.errors import RecipeError

ColdPolicy = Literal["shrink", "rtn", "all_tokens", "error"]
"""What a recipe says about experts with fewer tokens than it asks for."""

COLD_POLICIES: Final[dict[ColdPolicy, str]] = {
    "shrink": "every expert leans on the layer's mean, the more the fewer tokens it saw; no threshold",
    "rtn": "all inputs of a cold expert count alike: it is rounded to nearest, on the scales of the method",
    "all_tokens": "a cold expert uses the mean over all tokens of the layer",
    "error": "a cold expert is refused",
}


def cold_moment(
    policy: ColdPolicy, own: np.ndarray, count: int, prior: np.ndarray, *, min_tokens: int, where: str
) -> np.ndarray | None:
    """The moment that an expert is rounded by; None: its weights count alike, as in rounding to nearest.

    Args:
        policy: see `COLD_POLICIES`.
        own: mean of x**2 [channels] or of x x^T [channels, channels] over the expert's tokens.
        count: those tokens.
        prior: the same over all tokens of the layer.
        min_tokens: an expert with fewer is cold.
        where: layer and expert, for the message.

    Raises:
        RecipeError: policy 'error' and a cold expert.
    """
    if policy == "shrink":
        return shrunk(own, count, prior)
    if count >= min_tokens:
        return own
    if policy == "error":
        raise RecipeError(
            f"{where} saw {count} calibration tokens, fewer than the {min_tokens} that the recipe asks for; calibrate "
            "with more text or use cold_expert = 'shrink'"
        )
    return prior if policy == "all_tokens" else None


def shrunk(own: np.ndarray, count: int, prior: np.ndarray) -> np.ndarray:
    """`r * own + (1 - r) * prior` with `r = count / (count + channels)`, float64.

    As if as many tokens of the prior's kind as there are channels had been seen beside the own, so that it is defined
    for none, and the matrix of few tokens has full rank.
    """
    share = count / (count + own.shape[-1])
    return share * own + (1 - share) * prior


def alike(own: np.ndarray) -> np.ndarray:
    """The prior of inputs that no other weight shares: all channels as large as their mean, none with any other."""
    if own.ndim == 1:
        return np.full_like(own, own.mean())
    return np.eye(len(own)) * (np.trace(own) / len(own))
