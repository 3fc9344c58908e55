"""MSE clip, weighted: try shrunken min/max scales, which cut the largest weights off to round the others finer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.rounding.slices import (
    Rounded,
    each_with_importance,
    on_grid,
    weighted_error,
    with_factor,
)
from jaxmoe.ptq.rounding.ssz import check_steps
from jaxmoe.quant.int8 import quantize_slices
from jaxmoe.quant.scheme import Bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """The shrunken scales: `1 - (1 - smallest) * i / steps` times the min/max scale, i = 0..steps."""

    smallest: float = 0.5
    """Least factor, between 0 and 1."""
    steps: int = 50
    """Factors below 1, at least one."""

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            RecipeError: one does not hold.
        """
        check_steps("clip", self.steps)
        if not 0 < self.smallest < 1:
            raise RecipeError(
                f"rounding clip: smallest = {self.smallest}, but a factor that shrinks a scale is between 0 and 1"
            )


def round_clip(
    weight: Float[Array, "*lead out in"],
    importance: Float[Array, "*lead in"] | None,
    group: int,
    bits: Bits,
    options: ClipOptions,
) -> Rounded:
    """Rounds with the shrunken scale of each group that has the least importance-weighted squared error.

    Args:
        weight: any float; computed in float32.
        importance: mean (or sum) of the squared inputs per input channel, not negative; None: all alike.
        group: input elements per scale.
        bits: of the grid.
        options: see there.

    Source: llm-compressor, observers `mse` and `imatrix_mse`.
    """
    factors = [1 - (1 - options.smallest) * i / options.steps for i in range(options.steps + 1)]
    return each_with_importance(partial(clip_slices, bits=bits, factors=factors), weight, importance, group)


def clip_slices(
    x: Float32[Array, "*lead width"],
    importance: Float32[Array, "*broadcast width"],
    bits: Bits,
    factors: Sequence[float],
) -> tuple[Int8[Array, "*lead width"], Float32[Array, "*lead"]]:
    """`round_clip` of slices, one scale each; `importance` has as many axes as `x`."""
    _, scale = quantize_slices(x, bits)
    units = x / scale[..., None]

    def attempt(state: tuple[jax.Array, jax.Array], tried: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        best, least = state
        factor = jnp.full_like(best, tried)
        error = weighted_error(units, on_grid(units, factor, bits), factor, importance)
        better = error < least  # never for NaN; of equal ones the largest scale
        return (jnp.where(better, factor, best), jnp.where(better, error, least)), None

    state = (jnp.ones_like(scale), jnp.full_like(scale, np.inf))
    (best, _), _ = lax.scan(attempt, state, jnp.asarray(factors, jnp.float32))
    return with_factor(x, best, importance, bits)
