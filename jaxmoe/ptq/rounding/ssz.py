"""SSZ, weighted: alternate between the best integers for a scale and the best scale for the integers."""

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
from jaxmoe.quant.int8 import quantize_slices
from jaxmoe.quant.scheme import Bits


@dataclass(frozen=True, slots=True, kw_only=True)
class SszOptions:
    """How far the search goes."""

    steps: int = 50
    """Alternations at most, at least one. They stop when no scale moves any more, which changes no result."""

    def __post_init__(self) -> None:
        """Checks the range.

        Raises:
            RecipeError: fewer than one step.
        """
        check_steps("ssz", self.steps)


def check_steps(method: str, steps: int) -> None:
    """Refuses a search that searches nothing.

    Raises:
        RecipeError: fewer than one step.
    """
    if steps < 1:
        raise RecipeError(f"rounding {method}: steps = {steps}, but a search needs one or more; use method nearest")


def round_ssz(
    weight: Float[Array, "*lead out in"],
    importance: Float[Array, "*lead in"] | None,
    group: int,
    bits: Bits,
    options: SszOptions,
) -> Rounded:
    """Rounds with the scale of each group that has the least importance-weighted squared error found.

    Args:
        weight: any float; computed in float32.
        importance: mean (or sum) of the squared inputs per input channel, not negative; None: all alike.
        group: input elements per scale.
        bits: of the grid.
        options: see there.

    Source: msModelSlim, core/quantizer/impl/ssz.py, which knows neither groups nor importance.
    """
    return each_with_importance(partial(ssz_slices, bits=bits, steps=options.steps), weight, importance, group)


def ssz_slices(
    x: Float32[Array, "*lead width"], importance: Float32[Array, "*broadcast width"], bits: Bits, steps: int
) -> tuple[Int8[Array, "*lead width"], Float32[Array, "*lead"]]:
    """`round_ssz` of slices, one scale each; `importance` has as many axes as `x`.

    A slice starts at its min/max scale and keeps the best scale seen, so that it is never worse than min/max. One whose
    integers do not change stays where it is: the number of steps others need cannot change it.
    """
    _, scale = quantize_slices(x, bits)
    units = x / scale[..., None]

    def refit(grid: jax.Array, factor: jax.Array) -> jax.Array:
        """The least-squares scale of these integers; without any of importance, the one there was."""
        along = jnp.sum(importance * (units * grid), axis=-1)
        square = jnp.sum(importance * jnp.square(grid), axis=-1)
        fits = (along > 0) & (square > 0)
        return jnp.where(fits, along / jnp.where(fits, square, np.float32(1)), factor)

    def moving(state: tuple[jax.Array, ...]) -> jax.Array:
        step, _, _, _, moved = state
        return (step <= steps) & jnp.any(moved)

    def alternate(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        step, factor, best, least, _ = state
        grid = on_grid(units, factor, bits)
        error = weighted_error(units, grid, factor, importance)
        better = error < least  # never for NaN
        after = refit(grid, factor)
        return step + 1, after, jnp.where(better, factor, best), jnp.where(better, error, least), after != factor

    one = jnp.ones_like(scale)
    state = (jnp.int32(0), one, one, jnp.full_like(scale, np.inf), jnp.ones_like(scale, jnp.bool_))
    _, _, best, _, _ = lax.while_loop(moving, alternate, state)
    return with_factor(x, best, importance, bits)
