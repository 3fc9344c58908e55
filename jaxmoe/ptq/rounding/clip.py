"""MSE clip, weighted: try shrunken min/max scales, which cut the largest weights off to round the others finer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.rounding.slices import (
    Rounded,
    importance_slices,
    join_groups,
    on_grid,
    split_groups,
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
    x, weights = split_groups(weight, group), importance_slices(importance, weight, group)
    q, scale = quantize_slices(x, bits)
    units = x / scale[..., None]
    start = jnp.ones_like(scale)
    factors = jnp.asarray(
        [1 - (1 - options.smallest) * i / options.steps for i in range(1, options.steps + 1)], jnp.float32
    )

    def attempt(state: tuple[jax.Array, jax.Array], tried: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        best, least = state
        factor = jnp.full_like(best, tried)
        error = weighted_error(units, on_grid(units, factor, bits), factor, weights)
        better = error < least  # never for NaN; of equal ones the largest scale
        return (jnp.where(better, factor, best), jnp.where(better, error, least)), None

    state = (start, weighted_error(units, q.astype(jnp.float32), start, weights))
    (best, _), _ = lax.scan(attempt, state, factors)
    q, scale = with_factor(x, best, weights, bits)
    return Rounded(qvalue=join_groups(q, weight.shape[-1]), scale=scale, status=jnp.zeros(weight.shape[:-2], jnp.int32))
