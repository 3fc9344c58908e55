"""Recipes: which role is stored how. Roles, not names: a family cannot be missed by a name pattern."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from jaxmoe.assets import asset
from jaxmoe.decode import decode, read_toml
from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.models.registry import FAMILIES
from jaxmoe.nn.param import Role
from jaxmoe.ops.pages import KVDtype
from jaxmoe.ptq.recipes.evidence import Evidence
from jaxmoe.ptq.recipes.names import module_names, takes, unmatched
from jaxmoe.ptq.rotation.plan import RotationRecipe
from jaxmoe.ptq.rounding import METHODS, MethodName, NearestOptions, Options
from jaxmoe.ptq.rounding.cold import ColdPolicy
from jaxmoe.quant.scheme import Scheme, parse_scheme
from jaxmoe.weights.formats import FLOAT_ROLES

FLOAT = "float"
Rounding = MethodName
"""How a rule rounds, see `METHODS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecipe:
    """What a calibrated recipe does before it rounds, and the data that it needs."""

    smooth: float | None = None
    """Share of the difficulty of large activation channels that moves into the weights; absent: none."""
    smooth_int4: float | None = None
    """The same of inputs that 4-bit weights read, which bear less; absent: as `smooth`."""
    search_hidden: bool = False
    """Whether each routed expert tries out which share its hidden channels bear best, instead of a given one."""
    cold_expert: ColdPolicy = "shrink"
    """Whose statistics experts get that saw fewer than `expert_tokens`, see `COLD_POLICIES`."""
    samples: int = 512
    min_tokens: int = 1024
    max_tokens: int = 4096
    expert_tokens: int = 256
    """Tokens that an expert should see; the report names those that saw fewer."""
    extend: bool = False
    """Whether to take more samples until every expert has seen `expert_tokens`."""

    def alpha(self, scheme: Scheme) -> float | None:
        """Of an input that a weight of this scheme reads; None: it is not smoothed."""
        return self.smooth_int4 if scheme.weight_bits == 4 and self.smooth_int4 is not None else self.smooth


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Roles and their scheme."""

    roles: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Patterns (see `recipes.names`) that a tensor of these roles must match too; none: all of them."""
    exclude: tuple[str, ...] = ()
    """Patterns of tensors that the rule leaves to later ones."""
    scheme: str
    """A scheme name, or 'float': copied as it is."""
    rounding: Rounding = "nearest"
    options: Options | None = None
    """Settings of the rounding method; absent: its defaults."""
    optional: bool = False
    """Whether it may match nothing, because only some families have its roles; else that is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Ordered rules, first match wins; every role of a model must be listed."""

    name: str
    rule: tuple[Rule, ...]
    kv_cache: KVDtype = "int8"
    """How keys and values are stored when the result is served."""
    calibration: CalibrationRecipe | None = None
    """Absent: the recipe needs no data."""
    rotation: RotationRecipe | None = None
    """What is rotated before anything else; absent: nothing. It needs no data."""
    quant_type: str | None = None
    """The `--quant-type` that chooses this recipe, such as 'w8a8'; absent: only its name does."""
    families: tuple[str, ...] = ()
    """Families that it is chosen for; none: all that no other recipe of the same quant type names."""
    evidence: tuple[Evidence, ...] = ()
    """What was measured with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a recipe decides for one parameter."""

    entry: Entry
    rule: int
    """Index of the rule."""
    scheme: Scheme | None
    rounding: Rounding = "nearest"
    options: Options = field(default_factory=NearestOptions)
    """Settings of the method `rounding`."""


def load_recipe(name: str | Path) -> Recipe:
    """The recipe of a name in configs/quant or of a TOML file.

    Raises:
        RecipeError: no such recipe, or settings, evidence, a quant type or families that cannot be.
        ConfigError: it has unknown or missing keys.
    """
    if str(name).endswith(".toml"):
        return read_recipe(Path(name))
    try:
        path = asset("configs", "quant", f"{name}.toml")
    except ConfigError:
        known = sorted(entry.stem for entry in asset("configs", "quant").glob("*.toml"))
        raise RecipeError(f"no recipe {name!r}; known are {', '.join(known)}, or give a .toml file") from None
    return read_recipe(path)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file.

    Raises:
        RecipeError, ConfigError: see `load_recipe`.
    """
    plain, options = _split_options(read_toml(path))
    try:
        recipe = decode(Recipe, plain, where=str(path))
        _check_labels(recipe)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    rules = tuple(
        rule if given is None else replace(rule, options=_options(rule, given, f"{path}.rule[{index}].options"))
        for index, (rule, given) in enumerate(zip(recipe.rule, options, strict=True))
    )
    return replace(recipe, rule=rules)


def match_recipe(recipe: Recipe, manifest: Manifest) -> tuple[Match, ...]:
    """The decision for every parameter, in the manifest's order.

    Raises:
        RecipeError: an unknown role, a tensor that no rule takes, a rule or a pattern that matches nothing, patterns
            that split a stack, a role that cannot be quantised, settings of another method, or an illegal scheme; the
            rule and a tensor are named.
    """
    _check_roles(recipe)
    _check_rounding(recipe)
    _check_calibration(recipe)
    _check_patterns(recipe, manifest)
    schemes = [_scheme(recipe, index, manifest) for index in range(len(recipe.rule))]
    matches = []
    for entry in manifest.entries:
        index = _rule_of(recipe, entry)
        rule = recipe.rule[index]
        options = METHODS[rule.rounding].options() if rule.options is None else rule.options
        matches.append(Match(entry=entry, rule=index, scheme=schemes[index], rounding=rule.rounding, options=options))
    used = {match.rule for match in matches}
    for index, rule in enumerate(recipe.rule):
        if index not in used and not rule.optional:
            raise RecipeError(f"{_where(recipe, index)} ({', '.join(rule.roles)}) matches nothing here")
    return tuple(matches)


def schemes_of_matches(matches: tuple[Match, ...]) -> dict[str, Scheme | None]:
    """Parameter path -> scheme."""
    return {match.entry.path: match.scheme for match in matches}


def _split_options(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The data without the rules' options, and those: which keys are legal hangs on the rule's method."""
    rules = data.get("rule")
    if not isinstance(rules, list):
        return dict(data), []
    tables = [rule if isinstance(rule, dict) else {} for rule in rules]
    plain = [
        {key: value for key, value in rule.items() if key != "options"} if isinstance(rule, dict) else rule
        for rule in rules
    ]
    return {**data, "rule": plain}, [table.get("options") for table in tables]


def _options(rule: Rule, given: Any, where: str) -> Options:
    try:
        return decode(METHODS[rule.rounding].options, given, where=where)
    except ConfigError as error:
        raise ConfigError(f"{error} (settings of rounding {rule.rounding!r})") from None
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _check_labels(recipe: Recipe) -> None:
    # Commands name folders after it.
    if recipe.name in ("", ".", "..") or any(part in recipe.name for part in ("/", "\\", "\0")):
        raise RecipeError(
            f"name {recipe.name!r} is also that of a folder: it must be one part of a path, not empty, without / and \\"
        )
    label = recipe.quant_type
    if label is not None and not any(rule.scheme.startswith(f"{label}-") for rule in recipe.rule):
        raise RecipeError(f"quant_type {label!r}: no rule has a scheme {label}-...")
    unknown = [family for family in recipe.families if family not in FAMILIES]
    if unknown:
        raise RecipeError(f"unknown family {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    if recipe.families and label is None:
        raise RecipeError("families are what a quant type is chosen for, but there is no quant_type")


def _check_roles(recipe: Recipe) -> None:
    known = get_args(Role)
    for index, rule in enumerate(recipe.rule):
        wrong = [role for role in rule.roles if role not in known]
        if wrong:
            raise RecipeError(
                f"{_where(recipe, index)} lists unknown role {', '.join(wrong)}; known: {', '.join(known)}"
            )
        forbidden = [role for role in rule.roles if role in FLOAT_ROLES and rule.scheme != FLOAT]
        if forbidden:
            raise RecipeError(f"{_where(recipe, index)} quantises {', '.join(forbidden)}, which always stay float")


def _check_rounding(recipe: Recipe) -> None:
    for index, rule in enumerate(recipe.rule):
        expected = METHODS[rule.rounding].options
        if rule.options is not None and type(rule.options) is not expected:
            raise RecipeError(
                f"{_where(recipe, index)} rounds with {rule.rounding}, whose settings are {expected.__name__}, not "
                f"{type(rule.options).__name__}"
            )
        if rule.scheme == FLOAT and (rule.rounding != "nearest" or rule.options is not None):
            raise RecipeError(
                f"{_where(recipe, index)} keeps floats, which are not rounded: leave out rounding and options"
            )


def _check_calibration(recipe: Recipe) -> None:
    for index, rule in enumerate(recipe.rule):
        needs = METHODS[rule.rounding].needs
        if needs != "nothing" and recipe.calibration is None:
            raise RecipeError(
                f"{_where(recipe, index)} rounds with {rule.rounding}, which weighs errors by the {needs} of inputs: "
                "that needs a [calibration] table"
            )
    if recipe.calibration is None:
        return
    calibration = recipe.calibration
    for key in ("smooth", "smooth_int4"):
        share = getattr(calibration, key)
        if share is not None and not 0 < share <= 1:
            raise RecipeError(f"recipe {recipe.name}: {key} = {share} is not in (0, 1]")
    if calibration.smooth is None and (calibration.smooth_int4 is not None or calibration.search_hidden):
        key = "search_hidden" if calibration.smooth_int4 is None else "smooth_int4"
        raise RecipeError(f"recipe {recipe.name}: {key} has no effect without smooth; set smooth too, or leave it out")
    for key in ("samples", "min_tokens", "expert_tokens"):
        if getattr(calibration, key) < 1:
            raise RecipeError(f"recipe {recipe.name}: {key} = {getattr(calibration, key)} is below 1")
    if calibration.max_tokens < calibration.min_tokens:
        raise RecipeError(
            f"recipe {recipe.name}: max_tokens = {calibration.max_tokens} is below min_tokens = "
            f"{calibration.min_tokens}"
        )


def _check_patterns(recipe: Recipe, manifest: Manifest) -> None:
    for index, rule in enumerate(recipe.rule):
        if not rule.names and not rule.exclude:
            continue
        names = [name for entry in manifest.entries if entry.role in rule.roles for name in module_names(entry)]
        missing = unmatched((*rule.names, *rule.exclude), names)
        if missing:
            raise RecipeError(
                f"{_where(recipe, index)}: pattern {missing[0]!r} matches none of the {len(names)} tensors of "
                f"{', '.join(rule.roles)}"
                + (f", such as {names[0]}" if names else "")
                + "; patterns match tensor names without '.weight'"
            )


def _rule_of(recipe: Recipe, entry: Entry) -> int:
    listed = False
    for index, rule in enumerate(recipe.rule):
        if entry.role in rule.roles:
            listed = True
            if takes(entry, rule.names, rule.exclude, _where(recipe, index)):
                return index
    tensor = next(name for _, name in entry.tensors())
    if listed:
        raise RecipeError(
            f"recipe {recipe.name}: the patterns of all rules that list role {entry.role!r} leave out tensor {tensor}; "
            "add a rule without names for it"
        )
    raise RecipeError(f"recipe {recipe.name}: no rule lists role {entry.role!r} (tensor {tensor})")


def _scheme(recipe: Recipe, index: int, manifest: Manifest) -> Scheme | None:
    rule = recipe.rule[index]
    if rule.scheme == FLOAT:
        return None
    try:
        return parse_scheme(rule.scheme)
    except RecipeError as error:
        first = next((e for e in manifest.entries if e.role in rule.roles), None)
        tensor = "" if first is None else f" for tensor {next(name for _, name in first.tensors())}"
        raise RecipeError(f"{_where(recipe, index)}{tensor}: {error}") from error


def _where(recipe: Recipe, index: int) -> str:
    return f"recipe {recipe.name}: rule {index + 1}"
