"""Recipes: which role is stored how. Roles, not names: a family cannot be missed by a name pattern."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from jaxmoe.assets import asset
from jaxmoe.decode import decode, read_toml
from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.nn.param import Role
from jaxmoe.ops.pages import KVDtype
from jaxmoe.quant.scheme import Scheme, parse_scheme
from jaxmoe.weights.formats import FLOAT_ROLES

FLOAT = "float"
Rounding = Literal["nearest", "ssz"]
"""To nearest with the group's largest magnitude as the end of the grid, or with the scale that makes the error weighted
by the importance of input channels smallest (needs calibration)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecipe:
    """What a calibrated recipe does before it rounds."""

    smooth: float | None = None
    """Share of the difficulty of large activation channels that moves into the weights; absent: none."""
    samples: int = 512
    min_tokens: int = 1024
    max_tokens: int = 4096
    expert_tokens: int = 256
    """Tokens that an expert should see; the report names those that saw fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Roles and their scheme."""

    roles: tuple[str, ...]
    scheme: str
    """A scheme name, or 'float': copied as it is."""
    rounding: Rounding = "nearest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Ordered rules, first match wins; every role of a model must be listed."""

    name: str
    rule: tuple[Rule, ...]
    kv_cache: KVDtype = "int8"
    """How keys and values are stored when the result is served."""
    calibration: CalibrationRecipe | None = None
    """Absent: the recipe needs no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a recipe decides for one parameter."""

    entry: Entry
    rule: int
    """Index of the rule."""
    scheme: Scheme | None
    rounding: Rounding = "nearest"


def load_recipe(name: str | Path) -> Recipe:
    """The recipe of a name in configs/quant or of a TOML file.

    Raises:
        RecipeError: no such recipe.
        ConfigError: it has unknown or missing keys.
    """
    if str(name).endswith(".toml"):
        path = Path(name)
    else:
        try:
            path = asset("configs", "quant", f"{name}.toml")
        except ConfigError:
            known = sorted(entry.stem for entry in asset("configs", "quant").glob("*.toml"))
            raise RecipeError(f"no recipe {name!r}; known are {', '.join(known)}, or give a .toml file") from None
    return decode(Recipe, read_toml(path), where=str(path))


def match_recipe(recipe: Recipe, manifest: Manifest) -> tuple[Match, ...]:
    """The decision for every parameter, in the manifest's order.

    Raises:
        RecipeError: an unknown role, a role that no rule lists, a rule that matches nothing, a role that cannot be
            quantised, or an illegal scheme; the rule and a tensor are named.
    """
    _check_roles(recipe)
    _check_calibration(recipe)
    by_role = _schemes_by_role(recipe, manifest)
    matches = []
    for entry in manifest.entries:
        if entry.role not in by_role:
            raise RecipeError(f"recipe {recipe.name}: no rule lists role {entry.role!r} (tensor {_example(entry)})")
        rule, scheme = by_role[entry.role]
        matches.append(Match(entry=entry, rule=rule, scheme=scheme, rounding=recipe.rule[rule].rounding))
    used = {match.rule for match in matches}
    for index, rule in enumerate(recipe.rule):
        if index not in used:
            raise RecipeError(f"recipe {recipe.name}: rule {index + 1} ({', '.join(rule.roles)}) matches nothing here")
    return tuple(matches)


def schemes_of_matches(matches: tuple[Match, ...]) -> dict[str, Scheme | None]:
    """Parameter path -> scheme."""
    return {match.entry.path: match.scheme for match in matches}


def _check_roles(recipe: Recipe) -> None:
    known = get_args(Role)
    for index, rule in enumerate(recipe.rule):
        wrong = [role for role in rule.roles if role not in known]
        if wrong:
            raise RecipeError(
                f"recipe {recipe.name}: rule {index + 1} lists unknown role {', '.join(wrong)}; "
                f"known: {', '.join(known)}"
            )
        forbidden = [role for role in rule.roles if role in FLOAT_ROLES and rule.scheme != FLOAT]
        if forbidden:
            raise RecipeError(
                f"recipe {recipe.name}: rule {index + 1} quantises {', '.join(forbidden)}, which always stay float"
            )


def _check_calibration(recipe: Recipe) -> None:
    weighted = [str(index + 1) for index, rule in enumerate(recipe.rule) if rule.rounding != "nearest"]
    if weighted and recipe.calibration is None:
        raise RecipeError(
            f"recipe {recipe.name}: rule {', '.join(weighted)} rounds by the importance of channels, which needs a "
            "[calibration] table"
        )
    smooth = None if recipe.calibration is None else recipe.calibration.smooth
    if smooth is not None and not 0 < smooth <= 1:
        raise RecipeError(f"recipe {recipe.name}: smooth = {smooth} is not in (0, 1]")


def _schemes_by_role(recipe: Recipe, manifest: Manifest) -> Mapping[str, tuple[int, Scheme | None]]:
    by_role: dict[str, tuple[int, Scheme | None]] = {}
    for index, rule in enumerate(recipe.rule):
        scheme = None
        if rule.scheme != FLOAT:
            try:
                scheme = parse_scheme(rule.scheme)
            except RecipeError as error:
                first = next((e for e in manifest.entries if e.role in rule.roles), None)
                tensor = "" if first is None else f" for tensor {_example(first)}"
                raise RecipeError(f"recipe {recipe.name}: rule {index + 1}{tensor}: {error}") from error
        for role in rule.roles:
            by_role.setdefault(role, (index, scheme))
    return by_role


def _example(entry: Entry) -> str:
    return next(name for _, name in entry.tensors())
