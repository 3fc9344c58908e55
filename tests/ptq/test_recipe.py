"""Recipes: what is shipped loads and fits, and what does not fit is refused by rule and tensor."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.nn.param import Role
from jaxmoe.ptq.recipe import Recipe, Rule, load_recipe, match_recipe, schemes_of_matches
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.formats import FLOAT_ROLES as FORMAT_FLOAT_ROLES
from tests import tiny

SHIPPED = sorted(path.stem for path in asset("configs", "quant").glob("*.toml"))
GLM = tiny.manifest_of(tiny.CONFIGS["glm4_moe"])
_FLOAT_BY_CHOICE = (
    "attention.q",
    "attention.k",
    "attention.q_a",
    "attention.q_b",
    "attention.kv_a",
    "indexer.q",
    "indexer.k",
)
FLOAT_ROLES = (*sorted(FORMAT_FLOAT_ROLES), *_FLOAT_BY_CHOICE)
ROUTED = ("experts.gate", "experts.up", "experts.down")
SCHEMES = {
    "w8a8-g128": ("w8a8-g128", "w8a8-g128"),
    "w8a16-g128": ("w8a16-g128", "w8a16-g128"),
    "w4a8-experts": ("w4a8-g128", "w8a8-g128"),
    "w8a8-g128-smooth": ("w8a8-g128", "w8a8-g128"),
    "w4a8-experts-ssz": ("w4a8-g128", "w8a8-g128"),
}
"""Shipped recipe -> schemes of routed experts and of everything else that is quantised."""
OTHERS = tuple(role for role in get_args(Role) if role not in FLOAT_ROLES)


def recipe(*rules: tuple[tuple[str, ...], str]) -> Recipe:
    return Recipe(name="mine", rule=tuple(Rule(roles=roles, scheme=scheme) for roles, scheme in rules))


GOOD = recipe((FLOAT_ROLES, "float"), (OTHERS, "w8a8-g128"))


def test_something_is_shipped() -> None:
    assert set(SHIPPED) == set(SCHEMES)


@pytest.mark.parametrize("family", tiny.CONFIGS)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_fit_every_family(name: str, family: str) -> None:
    loaded = load_recipe(name)
    assert loaded.name == name, "a recipe has the name of its file"
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    schemes = schemes_of_matches(match_recipe(loaded, manifest))
    assert list(schemes) == [entry.path for entry in manifest.entries]
    for entry in manifest.entries:
        expected = None if entry.role in FLOAT_ROLES else SCHEMES[name][entry.role not in ROUTED]
        scheme = schemes[entry.path]
        assert (None if scheme is None else scheme.name) == expected, entry.path


def test_unknown_recipe_lists_the_known_ones() -> None:
    known = "w4a8-experts, w4a8-experts-ssz, w8a16-g128, w8a8-g128, w8a8-g128-smooth"
    with pytest.raises(RecipeError, match=f"no recipe 'w4a4'; known are {known}, or give a .toml file"):
        load_recipe("w4a4")


def test_recipe_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[[rule]]\nroles = ["embed"]\nscheme = "float"\n', encoding="utf-8")
    assert load_recipe(path) == recipe((("embed",), "float"))
    assert load_recipe(str(path)).kv_cache == "int8"
    with pytest.raises(ConfigError, match="absent.toml does not exist"):
        load_recipe(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "mine"\n', "missing key rule"),
        ('name = "mine"\nkv_cashe = "int8"\nrule = []\n', "unknown key kv_cashe"),
        ('name = "mine"\nkv_cache = "int4"\nrule = []\n', "kv_cache.*int4"),
        ('name = "mine"\n[[rule]]\nroles = "embed"\nscheme = "float"\n', r"rule\[0\].roles: 'embed' is not a list"),
        ("name = ", "not readable as TOML"),
    ],
)
def test_recipe_files_are_decoded_strictly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path}.*{message}"):
        load_recipe(path)


def test_first_rule_that_lists_a_role_wins() -> None:
    both = recipe((FLOAT_ROLES, "float"), (("ffn.gate",), "w8a16-g64"), (OTHERS, "w8a8-channel"))
    by_role = {match.entry.role: match for match in match_recipe(both, GLM)}
    assert (by_role["ffn.gate"].rule, by_role["ffn.gate"].scheme) == (1, Scheme(activation_bits=16, group=64))
    assert (by_role["ffn.up"].rule, by_role["ffn.up"].scheme) == (2, Scheme(group=None))
    assert (by_role["embed"].rule, by_role["embed"].scheme) == (0, None)


def test_unknown_role() -> None:
    wrong = recipe((FLOAT_ROLES, "float"), ((*OTHERS, "expert.gate"), "w8a8-g128"))
    with pytest.raises(RecipeError, match="recipe mine: rule 2 lists unknown role expert.gate; known: .*experts.gate"):
        match_recipe(wrong, GLM)


def test_role_that_no_rule_lists() -> None:
    wrong = recipe((FLOAT_ROLES, "float"), (tuple(r for r in OTHERS if r != "experts.up"), "w8a8-g128"))
    tensor = r"model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight"
    with pytest.raises(RecipeError, match=rf"recipe mine: no rule lists role 'experts.up' \(tensor {tensor}\)"):
        match_recipe(wrong, GLM)


def test_rule_that_matches_nothing() -> None:
    hidden = replace(GOOD, rule=(*GOOD.rule, Rule(roles=("experts.up", "experts.gate"), scheme="w8a16-g128")))
    with pytest.raises(RecipeError, match=r"recipe mine: rule 3 \(experts.up, experts.gate\) matches nothing"):
        match_recipe(hidden, GLM)
    hunyuan = tiny.manifest_of(tiny.CONFIGS["hunyuan_v1_moe"])
    absent = recipe((tuple(r for r in FLOAT_ROLES if r != "router.bias"), "float"), (OTHERS, "w8a8-g128"))
    match_recipe(absent, hunyuan)
    with pytest.raises(RecipeError, match=r"rule 3 \(router.bias\) matches nothing"):
        match_recipe(replace(absent, rule=(*absent.rule, Rule(roles=("router.bias",), scheme="float"))), hunyuan)


@pytest.mark.parametrize("role", sorted(FORMAT_FLOAT_ROLES))
def test_roles_that_always_stay_float(role: str) -> None:
    wrong = replace(GOOD, rule=(Rule(roles=(role,), scheme="w8a8-g128"), *GOOD.rule))
    with pytest.raises(RecipeError, match=f"recipe mine: rule 1 quantises {role}, which always stay float"):
        match_recipe(wrong, GLM)


@pytest.mark.parametrize("scheme", ["w8a8-g48", "w8a8-g0", "w8a8-g512"])
def test_illegal_group_size_names_rule_and_tensor(scheme: str) -> None:
    wrong = recipe((FLOAT_ROLES, "float"), (OTHERS, scheme))
    tensor = r"model\.layers\.\d+\.[a-z_.0-9]+\.weight"
    with pytest.raises(RecipeError, match=f"recipe mine: rule 2 for tensor {tensor}: .*{scheme[6:]} is not one of 32"):
        match_recipe(wrong, GLM)


def test_unknown_scheme() -> None:
    with pytest.raises(RecipeError, match="rule 2 for tensor .*: unknown scheme 'w3a8-g128'"):
        match_recipe(recipe((FLOAT_ROLES, "float"), (OTHERS, "w3a8-g128")), GLM)


def test_calibrated_recipes(tmp_path: Path) -> None:
    assert load_recipe("w8a8-g128").calibration is None
    loaded = load_recipe("w4a8-experts-ssz")
    assert loaded.calibration is not None and loaded.calibration.smooth == 0.4
    matches = {match.entry.role: match.rounding for match in match_recipe(loaded, GLM)}
    assert (matches["experts.gate"], matches["attention.o"]) == ("ssz", "nearest")
    without = replace(loaded, calibration=None)
    with pytest.raises(
        RecipeError, match=r"rule 2 rounds by the importance of channels, which needs a \[calibration\]"
    ):
        match_recipe(without, GLM)
    with pytest.raises(RecipeError, match=r"smooth = 1.5 is not in \(0, 1\]"):
        match_recipe(replace(loaded, calibration=replace(loaded.calibration, smooth=1.5)), GLM)
