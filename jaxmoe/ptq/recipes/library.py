"""The library: from `--quant-type w8a8c8` and a family to a recipe of configs/quant, without a question.

A recipe that has a `quant_type` is in the table. One that names the family wins over one that names none; two that
claim the same family and quant type are an error of the library.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from jaxmoe.assets import asset
from jaxmoe.errors import RecipeError, UnsupportedError
from jaxmoe.ptq.recipe import Recipe, read_recipe

_LABEL: Final = re.compile(r"w(\d+)a(\d+)(c8|f4|f8)?(s?)\Z")
"""The field's labels; f4, f8 and s are known only to be refused by name."""
_GRAMMAR: Final = "w<bits>a<bits>, with c8 for INT8 keys and values, such as w8a8 or w4a8c8"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantType:
    """A label such as 'w4a8c8'."""

    weight_bits: int
    activation_bits: int
    int8_cache: bool
    """Whether keys and values are INT8; else they stay float."""

    @property
    def label(self) -> str:
        """The part that recipes carry, without the cache."""
        return f"w{self.weight_bits}a{self.activation_bits}"

    @property
    def name(self) -> str:
        """The text form; `parse_quant_type` inverts it."""
        return self.label + ("c8" if self.int8_cache else "")


def parse_quant_type(text: str) -> QuantType:
    """The quant type of a label.

    Raises:
        RecipeError: the text is no label.
        UnsupportedError: a label of something that does not exist here; the reason and the nearest that does are named.
    """
    match = _LABEL.match(text)
    if match is None:
        raise RecipeError(f"quant type {text!r} is not {_GRAMMAR}")
    weight_bits, activation_bits, cache, sparse = int(match[1]), int(match[2]), match[3], bool(match[4])
    nearest = QuantType(
        weight_bits=4 if weight_bits < 8 else 8,
        activation_bits=8 if activation_bits <= 8 else 16,
        int8_cache=cache is not None,
    )
    reasons = []
    if weight_bits not in (4, 8):
        reasons.append(f"weights have 4 or 8 bits, not {weight_bits}")
    if activation_bits not in (8, 16):
        reasons.append(f"activations have 8 or 16 bits, not {activation_bits}")
    if cache in ("f4", "f8"):
        reasons.append(f"keys and values in floats of {cache[1:]} bits do not exist, INT8 (c8) does")
    if sparse:
        reasons.append("sparse weights do not exist")
    if reasons:
        raise UnsupportedError(
            f"quant type {text!r} is not supported: {'; '.join(reasons)}; the nearest is {nearest.name}"
        )
    return nearest


def recipe_for(quant_type: str, family: str, *, folder: Path | None = None) -> Recipe:
    """The recipe for a quant type and a family, its cache as the quant type says.

    Args:
        quant_type: such as 'w8a8' (keys and values stay float) or 'w8a8c8'.
        family: `model_type` of the model.
        folder: of the recipes; by default configs/quant.

    Raises:
        RecipeError: no label, no recipe for it, or two recipes that claim the family.
        UnsupportedError: see `parse_quant_type`.
    """
    wanted = parse_quant_type(quant_type)
    table = library(folder)
    fitting = [recipe for recipe in table if recipe.quant_type == wanted.label]
    own = [recipe for recipe in fitting if family in recipe.families]
    chosen = own or [recipe for recipe in fitting if not recipe.families]
    if not chosen:
        known = sorted({recipe.quant_type for recipe in table if recipe.quant_type})
        raise RecipeError(
            f"no recipe for quant type {quant_type!r} and family {family!r}; there are {', '.join(known)} (each also "
            "with c8), or give --recipe"
        )
    if len(chosen) > 1:
        names = " and ".join(recipe.name for recipe in chosen)
        raise RecipeError(f"recipes {names} both claim quant type {wanted.label!r} and family {family!r}")
    return replace(chosen[0], kv_cache="int8" if wanted.int8_cache else "bfloat16")


def library(folder: Path | None = None) -> tuple[Recipe, ...]:
    """All recipes of a folder (by default configs/quant) by name.

    Raises:
        ConfigError, RecipeError: one of them is wrong, see `load_recipe`.
    """
    folder = asset("configs", "quant") if folder is None else folder
    return tuple(read_recipe(path) for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem))
