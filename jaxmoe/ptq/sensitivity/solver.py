"""Which scheme each unit gets under a limit of bytes, so that the sum of predicted errors is smallest; exact.

A unit is a set of weights that share a scheme. Bytes and errors of a choice are sums over units, so that a beginning
that another beginning beats in both can be dropped: whatever follows, it stays beaten. What is left after the last unit
holds the best choice for every limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from jaxmoe.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to store a unit. nbytes >= 0; error >= 0 and finite."""

    scheme: str
    nbytes: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Weights that share a scheme; of choices that are equally good the first is taken."""

    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best choice. nbytes and error are the sums over `choices`, one for each unit."""

    choices: tuple[Choice, ...]
    nbytes: int
    error: float


def solve(units: Sequence[Unit], budget_bytes: int) -> Solution:
    """The choice of least error that takes at most `budget_bytes`; among those, one of fewest bytes.

    Raises:
        RecipeError: even the smallest choice takes more.
    """
    least = [min(choice.nbytes for choice in unit.choices) for unit in units]
    if sum(least) > budget_bytes:
        raise RecipeError(
            f"a budget of {budget_bytes:,} bytes for what may be quantised is not enough: the smallest schemes take "
            f"{sum(least):,} bytes"
        )
    sums, errors = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for index, unit in enumerate(units):
        nbytes = np.array([choice.nbytes for choice in unit.choices], np.int64)
        added = np.array([choice.error for choice in unit.choices])
        # Beginnings in order, and for each the choices in order.
        all_bytes = (sums[:, None] + nbytes[None, :]).reshape(-1)
        all_errors = (errors[:, None] + added[None, :]).reshape(-1)
        kept = _undominated(all_bytes, all_errors, budget_bytes - sum(least[index + 1 :]))
        steps.append(np.divmod(kept, len(unit.choices)))
        sums, errors = all_bytes[kept], all_errors[kept]
    place = len(sums) - 1
    chosen: list[Choice] = []
    for unit, (before, which) in zip(reversed(units), reversed(steps), strict=True):
        chosen.append(unit.choices[int(which[place])])
        place = int(before[place])
    choices = tuple(reversed(chosen))
    return Solution(
        choices=choices,
        nbytes=sum(choice.nbytes for choice in choices),
        error=sum((choice.error for choice in choices), 0.0),
    )


def _undominated(
    nbytes: Int64[np.ndarray, " ways"], errors: Float64[np.ndarray, " ways"], most: int
) -> Int64[np.ndarray, " kept"]:
    """Places of ways within `most` bytes that no other beats, in ascending bytes, so in descending errors."""
    order = np.lexsort((errors, nbytes))
    order = order[nbytes[order] <= most]
    best_before = np.minimum.accumulate(np.concatenate([[np.inf], errors[order][:-1]]))
    return order[errors[order] < best_before].astype(np.int64)
