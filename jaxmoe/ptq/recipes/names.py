"""Patterns over tensor names, and which parameters they take.

A pattern is fnmatch's, matched against a Hugging Face tensor name without its '.weight' (the module's name), so that
'*gate' is a router and not a gate_proj. A parameter is a stack of layers and experts that share one scheme: patterns
take it whole or not at all.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate

from jaxmoe.errors import RecipeError
from jaxmoe.models.manifest import Entry

Matcher = Callable[[str], bool]


def matcher(patterns: Sequence[str]) -> Matcher:
    """Whether a name matches one of the patterns; with none, no name does."""
    if not patterns:
        return lambda name: False
    compiled = re.compile("|".join(translate(pattern) for pattern in patterns))
    return lambda name: compiled.match(name) is not None


def module_names(entry: Entry) -> list[str]:
    """Names of a parameter's tensors without '.weight', in the order of the stack."""
    return [name.removesuffix(".weight") for _, name in entry.tensors()]


def matches_any(entry: Entry, match: Matcher) -> bool:
    """Whether some tensor of a parameter matches."""
    return any(match(name) for name in module_names(entry))


def takes(entry: Entry, names: Sequence[str], exclude: Sequence[str], where: str) -> bool:
    """Whether patterns take a parameter: `names` (none: all) without `exclude`, which wins.

    Raises:
        RecipeError: they take some of its tensors; one that they take and one that they do not are named.
    """
    if not names and not exclude:
        return True
    included, excluded = matcher(names or ("*",)), matcher(exclude)
    taken = left = None
    for name in module_names(entry):
        if included(name) and not excluded(name):
            taken = taken or name
        else:
            left = left or name
    if taken is not None and left is not None:
        raise RecipeError(
            f"{where}: the patterns take {taken} but not {left}; both are in the stack {entry.path}, whose layers and "
            "experts share one scheme: let the patterns take all of them or none"
        )
    return taken is not None


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The patterns that match none of the names."""
    return [pattern for pattern in patterns if not any(map(matcher((pattern,)), names))]
