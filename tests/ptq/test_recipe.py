"""Recipes: what is shipped loads and fits, and what does not fit is refused by rule and tensor."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.nn.param import Role
from jaxmoe.ptq.recipe import CalibrationRecipe, Recipe, Rule, load_recipe, match_recipe, schemes_of_matches
from jaxmoe.ptq.rounding import METHODS, NearestOptions
from jaxmoe.ptq.rounding.clip import ClipOptions
from jaxmoe.ptq.rounding.gptq import GptqOptions
from jaxmoe.ptq.rounding.ssz import SszOptions
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
    "w4a8-experts-gptq": ("w4a8-g128", "w8a8-g128"),
    "w4a16-experts-ssz": ("w4a16-g128", "w8a16-g128"),
    "w8a8-channel": ("w8a8-channel", "w8a8-channel"),
    "w8a8-g64": ("w8a8-g64", "w8a8-g64"),
    "w8a8-g128-rotated": ("w8a8-g128", "w8a8-g128"),
    "w4a8-experts-learned": ("w4a8-g128", "w8a8-g128"),
}
"""Shipped recipe -> schemes of routed experts and of everything else that is quantised."""
OTHERS = tuple(role for role in get_args(Role) if role not in FLOAT_ROLES)


def recipe(*rules: tuple[tuple[str, ...], str]) -> Recipe:
    return Recipe(name="mine", rule=tuple(Rule(roles=roles, scheme=scheme) for roles, scheme in rules))


GOOD = recipe((FLOAT_ROLES, "float"), (OTHERS, "w8a8-g128"))


JOINED = ("attention.q", "attention.k", "attention.q_a", "attention.q_b", "attention.kv_a")
"""What other engines join with v or with each other, so that it has their scheme."""


FLOAT_INPUT_OF_V = ("w8a8-g128-smooth", "w4a8-experts-gptq", "w4a8-experts-learned", "w4a8-experts-ssz")


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
        if name in FLOAT_INPUT_OF_V and entry.role == "attention.v":
            expected = "w8a16-g128"
        if name == "w8a8-channel" and entry.role in JOINED:
            expected = "w8a8-channel"
        scheme = schemes[entry.path]
        assert (None if scheme is None else scheme.name) == expected, entry.path


def test_unknown_recipe_lists_the_known_ones() -> None:
    known = (
        "w4a16-experts-ssz, w4a8-experts, w4a8-experts-gptq, w4a8-experts-learned, w4a8-experts-ssz, w8a16-g128, "
        "w8a8-channel, w8a8-g128, w8a8-g128-rotated, w8a8-g128-smooth, w8a8-g64"
    )
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
        ('name = "mine"\n[[rule]]\nroles = ["embed"]\nscheme = "float"\nrounding = "gtpq"\n', "'gtpq' is not one of"),
        ('name = "mine"\n[[rule]]\nroles = ["embed"]\nscheme = "float"\nname = ["*"]\n', "unknown key name"),
        ('name = "mine"\nrule = []\n[calibration]\ncold_experts = "rtn"\n', "unknown key cold_experts"),
        ('name = "mine"\nrule = []\n[calibration]\ncold_expert = "drop"\n', "'drop' is not one of 'shrink', 'rtn'"),
        ('name = "mine"\nrule = []\n[rotation]\ntied = "both"\n', "'both' is not one of 'refuse', 'untie'"),
    ],
)
def test_recipe_files_are_decoded_strictly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path}.*{message}"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["", ".", "..", "../mine", "a/b", "/mine", "a\\\\b"])
def test_a_name_is_one_part_of_a_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "{name}"\nrule = []\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"mine.toml: name '.*' is also that of a folder"):
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


def test_an_optional_rule_may_match_nothing() -> None:
    """But its roles are checked as all others."""
    hunyuan = tiny.manifest_of(tiny.CONFIGS["hunyuan_v1_moe"])
    base = recipe((tuple(r for r in FLOAT_ROLES if r != "router.bias"), "float"), (OTHERS, "w8a8-g128"))
    rule = Rule(roles=("router.bias",), scheme="float", optional=True)
    assert match_recipe(replace(base, rule=(*base.rule, rule)), hunyuan) == match_recipe(base, hunyuan)
    with pytest.raises(RecipeError, match="rule 3 lists unknown role router.bies"):
        match_recipe(replace(base, rule=(*base.rule, replace(rule, roles=("router.bies",)))), hunyuan)


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
    assert loaded.calibration is not None and loaded.calibration.smooth == 0.8
    matches = {match.entry.role: match.rounding for match in match_recipe(loaded, GLM)}
    assert (matches["experts.gate"], matches["attention.o"]) == ("ssz", "nearest")
    without = replace(loaded, calibration=None)
    with pytest.raises(
        RecipeError,
        match=r"rule 2 rounds with ssz, which weighs errors by the importance of inputs: that needs a \[calibration\]",
    ):
        match_recipe(without, GLM)
    with pytest.raises(RecipeError, match=r"smooth = 1.5 is not in \(0, 1\]"):
        match_recipe(replace(loaded, calibration=replace(loaded.calibration, smooth=1.5)), GLM)


def experts_with(text: str) -> str:
    """A recipe file whose second rule, for experts, has more lines."""
    rest = tuple(role for role in OTHERS if role not in ROUTED)
    rules = ((FLOAT_ROLES, "float", ""), (ROUTED, "w4a8-g128", text), (rest, "w8a8-g128", ""))
    tables = (f"[[rule]]\nroles = {list(roles)}\nscheme = '{scheme}'\n{more}\n" for roles, scheme, more in rules)
    return "name = 'mine'\n[calibration]\n" + "".join(tables)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", NearestOptions()),
        ("rounding = 'nearest'\n[rule.options]", NearestOptions()),
        ("rounding = 'ssz'", SszOptions()),
        ("rounding = 'ssz'\noptions = { steps = 10 }", SszOptions(steps=10)),
        ("rounding = 'clip'\n[rule.options]\nsmallest = 0.7\nsteps = 30", ClipOptions(smallest=0.7, steps=30)),
        (
            "rounding = 'gptq'\n[rule.options]\ndamping = 0.02\nscale = 'minmax'",
            GptqOptions(damping=0.02, scale="minmax"),
        ),
    ],
)
def test_settings_of_methods(tmp_path: Path, text: str, options: object) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(experts_with(text), encoding="utf-8")
    matches = match_recipe(load_recipe(path), GLM)
    for match in matches:
        expected = options if match.entry.role in ROUTED else NearestOptions()
        assert match.options == expected
        assert METHODS[match.rounding].options is type(match.options)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "rounding = 'ssz'\noptions = { step = 10 }",
            ConfigError,
            r"rule\[1\].options: unknown key step; known are steps",
        ),
        (
            "rounding = 'ssz'\noptions = { damping = 0.1 }",
            ConfigError,
            r"unknown key damping.*settings of rounding 'ssz'",
        ),
        ("options = { steps = 10 }", ConfigError, r"unknown key steps.*settings of rounding 'nearest'"),
        ("rounding = 'ssz'\noptions = { steps = '10' }", ConfigError, r"options.steps: '10' is not a int"),
        ("rounding = 'ssz'\noptions = 10", ConfigError, r"rule\[1\].options: 10 is not a table"),
        ("rounding = 'ssz'\noptions = { steps = 0 }", RecipeError, r"rule\[1\].options: rounding ssz: steps = 0"),
        (
            "rounding = 'gptq'\noptions = { damping = -1 }",
            RecipeError,
            r"rule\[1\].options: rounding gptq: damping = -1",
        ),
    ],
)
def test_wrong_settings_of_methods(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(experts_with(text), encoding="utf-8")
    with pytest.raises(error, match=f"{path}.*{message}"):
        load_recipe(path)


def test_settings_belong_to_their_method_and_to_rounding() -> None:
    wrong = replace(GOOD, rule=(GOOD.rule[0], replace(GOOD.rule[1], options=SszOptions())))
    with pytest.raises(RecipeError, match="rule 2 rounds with nearest, whose settings are NearestOptions, not SszOpt"):
        match_recipe(wrong, GLM)
    wrong = replace(GOOD, rule=(replace(GOOD.rule[0], rounding="ssz"), GOOD.rule[1]), calibration=CalibrationRecipe())
    with pytest.raises(RecipeError, match="rule 1 keeps floats, which are not rounded: leave out rounding"):
        match_recipe(wrong, GLM)
    wrong = replace(GOOD, rule=(GOOD.rule[0], replace(GOOD.rule[1], rounding="gptq")))
    with pytest.raises(RecipeError, match="rule 2 rounds with gptq, which weighs errors by the hessian of inputs"):
        match_recipe(wrong, GLM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples = 0 is below 1"),
        ({"expert_tokens": 0}, "expert_tokens = 0 is below 1"),
        ({"min_tokens": 64, "max_tokens": 32}, "max_tokens = 32 is below min_tokens = 64"),
    ],
)
def test_numbers_of_calibration(changes: dict[str, int], message: str) -> None:
    with pytest.raises(RecipeError, match=f"recipe mine: {message}"):
        match_recipe(replace(GOOD, calibration=CalibrationRecipe(**changes)), GLM)


def with_rule(**settings: object) -> Recipe:
    """GOOD with a first rule of more settings."""
    return replace(GOOD, rule=(Rule(**{"scheme": "w8a16-g64", **settings}), *GOOD.rule))  # pyright: ignore


def test_names_restrict_a_rule_within_its_roles() -> None:
    """The dense layer, the expert layers and the MTP block are stacks of their own."""
    recipe = with_rule(roles=OTHERS, names=("model.layers.0.*", "*.mlp.experts.*"), exclude=("*.down_proj",))
    deepseek = tiny.manifest_of(tiny.CONFIGS["deepseek_v3"])
    matches = {match.entry.path: match for match in match_recipe(recipe, deepseek)}
    taken = {path for path, match in matches.items() if match.rule == 0}
    assert taken == {
        "dense.attention.o",
        *(f"{stack}.ffn.{part}" for stack in ("dense", "moe", "mtp.block") for part in ("gate", "up")),
    }
    assert matches["dense.ffn.down"].scheme == matches["moe.ffn.shared.gate"].scheme == Scheme(group=128)


def test_names_take_fused_tensors_under_their_own_name() -> None:
    fused = tiny.manifest_of(tiny.CONFIGS["gpt_oss"])
    recipe = with_rule(roles=ROUTED, names=("*.mlp.experts.gate_up_proj",))
    rules = {match.entry.role: match.rule for match in match_recipe(recipe, fused)}
    assert (rules["experts.gate"], rules["experts.up"], rules["experts.down"]) == (0, 0, 2)


def test_a_pattern_matches_without_the_suffix() -> None:
    """'*gate' is a router, not a gate_proj, and '.weight' is no part of a module's name."""
    with pytest.raises(RecipeError, match=r"pattern '\*gate' matches none of the \d+ tensors of experts.gate, such as"):
        match_recipe(with_rule(roles=("experts.gate",), names=("*gate",)), GLM)
    with pytest.raises(RecipeError, match=r"'\*\.weight' matches none.*patterns match tensor names without '.weight'"):
        match_recipe(with_rule(roles=("experts.gate",), names=("*.weight",)), GLM)
    with pytest.raises(RecipeError, match=r"rule 1: pattern '\*experst\*' matches none"):
        match_recipe(with_rule(roles=ROUTED, names=("*",), exclude=("*experst*",)), GLM)


@pytest.mark.parametrize(
    ("settings", "taken", "left"),
    [
        ({"names": ("model.layers.1.*",)}, r"layers\.1\.mlp\.experts\.0\.", r"layers\.2\.mlp\.experts\.0\."),
        ({"names": ("*.experts.3.*",)}, r"layers\.1\.mlp\.experts\.3\.", r"layers\.1\.mlp\.experts\.0\."),
        ({"exclude": ("*.layers.2.*",)}, r"layers\.1\.mlp\.experts\.0\.", r"layers\.2\.mlp\.experts\.0\."),
    ],
)
def test_a_stack_is_taken_whole(settings: dict[str, tuple[str, ...]], taken: str, left: str) -> None:
    message = f"rule 1: the patterns take model.{taken}down_proj but not model.{left}down_proj; both are in the stack"
    with pytest.raises(RecipeError, match=message):
        match_recipe(with_rule(roles=("experts.down",), **settings), GLM)


def test_what_all_patterns_leave_out_is_an_error() -> None:
    only = replace(GOOD, rule=(GOOD.rule[0], replace(GOOD.rule[1], names=("*experts*", "*self_attn*"))))
    with pytest.raises(RecipeError, match="all rules that list role 'ffn.down' leave out tensor model.layers.0.mlp"):
        match_recipe(only, GLM)
