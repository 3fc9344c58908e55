"""The dry-run table of a recipe: what each rule takes, and to how many bytes."""

import math
from dataclasses import dataclass

from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.ptq.recipe import FLOAT, Match, Recipe, Rounding, match_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """One rule."""

    rule: int
    """Its index."""
    roles: tuple[str, ...]
    """Those of its roles that it takes something of, in its order."""
    names: tuple[str, ...]
    exclude: tuple[str, ...]
    tensors: int
    """Tensors of the source that it takes; one that two parameters share counts once."""
    example: str
    """The first of them."""
    scheme: str
    rounding: Rounding | None
    """None: not rounded."""
    source_bytes: int
    result_bytes: int


def explain(recipe: Recipe, manifest: Manifest, *, element_bytes: int = 2) -> tuple[RuleRow, ...]:
    """What a recipe does with a model, rule by rule; nothing is read.

    Args:
        recipe: the rules.
        manifest: the model.
        element_bytes: size of a source element, 2 for bfloat16; parameters that are always float32 count as such.

    Raises:
        RecipeError: the recipe does not fit, see `match_recipe`, or a scheme cannot store a shape.
    """
    matches = match_recipe(recipe, manifest)
    return tuple(
        _row(recipe, index, [match for match in matches if match.rule == index], element_bytes)
        for index in range(len(recipe.rule))
    )


def _row(recipe: Recipe, index: int, matches: list[Match], element_bytes: int) -> RuleRow:
    rule = recipe.rule[index]
    present = {match.entry.role for match in matches}
    tensors = list(dict.fromkeys(name for match in matches for _, name in match.entry.tensors()))
    before = [_float_bytes(match.entry, element_bytes) for match in matches]
    after = [
        kept if match.scheme is None else match.scheme.stored_bytes(match.entry.shape)
        for match, kept in zip(matches, before, strict=True)
    ]
    return RuleRow(
        rule=index,
        roles=tuple(role for role in dict.fromkeys(rule.roles) if role in present),
        names=rule.names,
        exclude=rule.exclude,
        tensors=len(tensors),
        example=tensors[0],
        scheme=rule.scheme,
        rounding=None if rule.scheme == FLOAT else rule.rounding,
        source_bytes=sum(before),
        result_bytes=sum(after),
    )


def _float_bytes(entry: Entry, element_bytes: int) -> int:
    return math.prod(entry.shape) * (4 if entry.float32 else element_bytes)
