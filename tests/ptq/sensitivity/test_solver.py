"""The solver against trying everything."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.sensitivity.solver import Choice, Unit, solve

DRAWN = st.lists(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4), max_size=5)
"""(bytes, error) of each choice of each unit."""


def made(drawn: list[list[tuple[int, int]]]) -> list[Unit]:
    """Quarters are exact in any order of a sum."""
    return [
        Unit(choices=tuple(Choice(scheme="s", nbytes=size, error=error / 4) for size, error in choices))
        for choices in drawn
    ]


@given(DRAWN, st.integers(0, 80))
def test_no_other_choice_is_better(drawn: list[list[tuple[int, int]]], budget_bytes: int) -> None:
    units = made(drawn)
    ways = list(itertools.product(*(unit.choices for unit in units)))
    allowed = [(sum(c.error for c in way), sum(c.nbytes for c in way)) for way in ways]
    allowed = [each for each in allowed if each[1] <= budget_bytes]
    if not allowed:
        with pytest.raises(RecipeError, match="is not enough: the smallest schemes take"):
            solve(units, budget_bytes)
        return
    best = solve(units, budget_bytes)
    assert (best.error, best.nbytes) == min(allowed)
    assert all(choice in unit.choices for choice, unit in zip(best.choices, units, strict=True))


@given(DRAWN)
def test_more_bytes_never_cost_quality(drawn: list[list[tuple[int, int]]]) -> None:
    units = made(drawn)
    least = sum(min(choice.nbytes for choice in unit.choices) for unit in units)
    errors = [solve(units, budget).error for budget in range(least, least + 30)]
    assert errors == sorted(errors, reverse=True)


def test_many_units_with_few_equal_sums() -> None:
    """Nine units of five choices are two million ways; what is beaten is dropped on the way."""
    units = [
        Unit(
            choices=tuple(
                Choice(scheme="s", nbytes=10**9 // (2 + c) + 7919 * index * c, error=float(c * (1 + index % 3)))
                for c in range(5)
            ),
        )
        for index in range(9)
    ]
    best = solve(units, 9 * 10**9 // 3)
    assert best.nbytes <= 9 * 10**9 // 3
    greedy = [unit.choices[1] for unit in units]
    assert best.error <= sum(c.error for c in greedy) or sum(c.nbytes for c in greedy) > 9 * 10**9 // 3


def test_first_of_equal_choices() -> None:
    unit = Unit(choices=(Choice(scheme="float", nbytes=1, error=0.0), Choice(scheme="w8a8-g128", nbytes=1, error=0.0)))
    assert solve([unit], 1).choices[0].scheme == "float"
