"""From an analysis and a limit of bytes to a recipe: which role gets which scheme."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from jaxmoe.errors import RecipeError
from jaxmoe.nn.param import Role
from jaxmoe.ptq.job import Job, is_routed
from jaxmoe.ptq.recipe import FLOAT
from jaxmoe.ptq.sensitivity.analyze import PROTECTED, measured_parts
from jaxmoe.ptq.sensitivity.solver import Choice, Solution, Unit, solve
from jaxmoe.quant.scheme import Scheme, parse_scheme

TOGETHER: Final[tuple[tuple[str, ...], ...]] = (
    ("experts.gate", "experts.up"),
    ("shared.gate", "shared.up"),
    ("ffn.gate", "ffn.up"),
)
"""Roles that other engines fuse into one matrix: they share a scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A recipe for a limit of bytes. total_bytes == solution.nbytes + bytes of what stays float in any case."""

    units: tuple[tuple[str, ...], ...]
    """Roles of each unit, in the order of the solution's choices."""
    solution: Solution
    total_bytes: int
    """Of all tensors of the result."""
    text: str
    """TOML, for `load_recipe`."""


def suggest(
    job: Job, analysis: Mapping[str, Any], schemes: Sequence[Scheme], budget_bytes: int, *, name: str
) -> Suggestion:
    """The recipe of least predicted output error whose result takes at most `budget_bytes`.

    The predicted error of a choice is the sum over linear layers (over a layer's experts together) of noise / signal of
    their outputs. Sensitive roles stay float, and so does what was not measured.

    Args:
        job: of `float_job`.
        analysis: the object of analysis.json.
        schemes: candidates, all of them measured.
        budget_bytes: of all tensors of the result.
        name: of the recipe.

    Raises:
        RecipeError: the budget is too small, or a candidate was not measured.
    """
    missing = [scheme.name for scheme in schemes if scheme.name not in analysis["schemes"]]
    if missing:
        raise RecipeError(f"{', '.join(missing)} was not measured; the analysis has {', '.join(analysis['schemes'])}")
    fixed = check_budget(job, schemes, budget_bytes)
    roles = _units(job)
    units = [_unit(job, analysis, members, schemes) for members in roles]
    solution = solve(units, budget_bytes - fixed)
    text = recipe_text(
        name,
        {member: choice.scheme for members, choice in zip(roles, solution.choices, strict=True) for member in members},
        present={match.entry.role for match in job.matches},
        comments=(
            f"Suggested by jaxmoe analyze for at most {budget_bytes:,} bytes: {fixed + solution.nbytes:,} bytes.",
            f"Sum of noise / signal over linear layers {solution.error:.6g}: the least that these schemes can do when",
            "a role has one scheme, weights are rounded to nearest, and what is sensitive stays float.",
        ),
    )
    return Suggestion(units=roles, solution=solution, total_bytes=fixed + solution.nbytes, text=text)


def check_budget(job: Job, schemes: Sequence[Scheme], budget_bytes: int) -> int:
    """Refuses a budget that no choice keeps; the result is the bytes of what stays float in any case.

    Args:
        job: of `float_job`.
        schemes: candidates.
        budget_bytes: of all tensors of the result.

    Raises:
        RecipeError: both numbers are named.
    """
    roles = _units(job)
    fixed = job.result_bytes - sum(_bytes(job, members, None) for members in roles)
    smallest = fixed + sum(min(_bytes(job, members, scheme) for scheme in (None, *schemes)) for members in roles)
    if smallest > budget_bytes:
        raise RecipeError(
            f"a budget of {budget_bytes:,} bytes is too small: with the smallest of "
            f"{', '.join(scheme.name for scheme in schemes)} the result takes {smallest:,} bytes, of which {fixed:,} "
            "stay float (embeddings, norms, routers, queries and keys); raise the budget or give smaller schemes"
        )
    return fixed


def recipe_text(name: str, schemes: Mapping[str, str], *, present: set[str], comments: Sequence[str]) -> str:
    """A recipe as TOML, one rule a scheme; roles without a scheme stay float.

    Args:
        name: of the recipe.
        schemes: role -> scheme or 'float'.
        present: roles of the model: a rule that takes nothing of it would be refused.
        comments: lines at the top.
    """
    by_scheme: dict[str, list[str]] = {FLOAT: []}
    for role in get_args(Role):
        scheme = schemes.get(role, FLOAT)
        if scheme == FLOAT or role in present:
            by_scheme.setdefault(scheme, []).append(role)
    lines = [*(f"# {comment}" for comment in comments), f'name = "{name}"', 'kv_cache = "int8"']
    for scheme, roles in by_scheme.items():
        lines += ["", "[[rule]]", "roles = ["]
        lines += [f'    "{role}",' for role in roles]
        lines += ["]", f'scheme = "{scheme}"']
    return "\n".join(lines) + "\n"


def _units(job: Job) -> tuple[tuple[str, ...], ...]:
    """Roles that are measured and may be quantised, those that share a scheme together."""
    layers = range(job.files.manifest.config.layers)
    measured = {part.match.entry.role for layer in layers for part in measured_parts(job, layer)}
    measured |= {match.entry.role for match in job.matches if is_routed(match.entry)}
    measured -= PROTECTED
    units = []
    for role in get_args(Role):
        group = next((group for group in TOGETHER if role in group), (role,))
        members = tuple(member for member in group if member in measured)
        if role in measured and members[0] == role:
            units.append(members)
    return tuple(units)


def _unit(job: Job, analysis: Mapping[str, Any], roles: tuple[str, ...], schemes: Sequence[Scheme]) -> Unit:
    rows = [row["error"] for row in analysis["linears"] if row["role"] in roles]
    choices = [Choice(scheme=FLOAT, nbytes=_bytes(job, roles, None), error=0.0)]
    for scheme in schemes:
        # A linear layer without an output has no error.
        error = sum((row[scheme.name] or 0.0 for row in rows), 0.0)
        choices.append(Choice(scheme=scheme.name, nbytes=_bytes(job, roles, scheme), error=error))
    return Unit(choices=tuple(choices))


def _bytes(job: Job, roles: tuple[str, ...], scheme: Scheme | None) -> int:
    parts = [part for part in job.parts if part.match.entry.role in roles]
    return sum(replace(part, match=replace(part.match, scheme=scheme)).result_bytes(job) for part in parts)


def schemes_of_bits(schemes: Sequence[str], activation_bits: int) -> tuple[Scheme, ...]:
    """Those of the schemes whose activations have so many bits: weight-only ones cost no less and run slower.

    Raises:
        RecipeError: there are none.
    """
    parsed = [scheme for scheme in map(parse_scheme, schemes) if scheme.activation_bits == activation_bits]
    if not parsed:
        raise RecipeError(f"none of {', '.join(schemes)} has {activation_bits}-bit activations; add one to --schemes")
    return tuple(parsed)
