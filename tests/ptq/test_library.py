"""The library: from a quant type and a family to one recipe; evidence that cannot be is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import ConfigError, RecipeError, UnsupportedError
from jaxmoe.ptq.recipe import load_recipe, match_recipe, read_recipe
from jaxmoe.ptq.recipes.library import QuantType, library, parse_quant_type, recipe_for
from tests import tiny

LABELS = ("w8a8", "w4a8", "w8a16", "w4a16")
QUANT_TYPES = tuple(f"{label}{cache}" for label in LABELS for cache in ("", "c8"))
MEASURED = """
[[evidence]]
model = "smollm2-moe"
text = "austen"
tokens = 17408
perplexity_increase = 0.004
date = "2026-11-30"
data_sha256 = "{sha}"
jaxmoe = "0.1.0"
"""


@pytest.mark.parametrize("family", tiny.CONFIGS)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_every_quant_type_has_a_recipe_for_every_family(quant_type: str, family: str) -> None:
    recipe = recipe_for(quant_type, family)
    wanted = parse_quant_type(quant_type)
    assert recipe.kv_cache == ("int8" if wanted.int8_cache else "bfloat16")
    matches = match_recipe(recipe, tiny.manifest_of(tiny.CONFIGS[family]))
    experts = {match.scheme for match in matches if match.entry.role == "experts.down"}
    assert {(scheme.weight_bits, scheme.activation_bits) for scheme in experts if scheme} == {
        (wanted.weight_bits, wanted.activation_bits)
    }


def test_the_library_is_what_is_shipped() -> None:
    assert [recipe.name for recipe in library()] == sorted(recipe.name for recipe in library())
    for recipe in library():
        assert load_recipe(recipe.name) == recipe
    assert {recipe.quant_type for recipe in library()} == {None, *LABELS}


@given(st.sampled_from([4, 8]), st.sampled_from([8, 16]), st.booleans())
def test_names_of_quant_types_invert(weight_bits: int, activation_bits: int, int8_cache: bool) -> None:
    quant_type = QuantType(weight_bits=weight_bits, activation_bits=activation_bits, int8_cache=int8_cache)
    assert parse_quant_type(quant_type.name) == quant_type


@pytest.mark.parametrize(
    ("text", "reason", "nearest"),
    [
        ("w4a4", "activations have 8 or 16 bits, not 4", "w4a8"),
        ("w4a4c8", "activations have 8 or 16 bits, not 4", "w4a8c8"),
        ("w4a4f4", "not 4; keys and values in floats of 4 bits do not exist, INT8 (c8) does", "w4a8c8"),
        ("w8a8f8", "keys and values in floats of 8 bits do not exist, INT8 (c8) does", "w8a8c8"),
        ("w8a8s", "sparse weights do not exist", "w8a8"),
        ("w16a16s", "weights have 4 or 8 bits, not 16; sparse weights do not exist", "w8a16"),
        ("w2a8", "weights have 4 or 8 bits, not 2", "w4a8"),
    ],
)
def test_labels_of_the_field_that_do_not_exist_here(text: str, reason: str, nearest: str) -> None:
    message = rf"quant type '{text}' is not supported: .*{re.escape(reason)}; the nearest is {nearest}\Z"
    with pytest.raises(UnsupportedError, match=message):
        recipe_for(text, "glm4_moe")
    assert nearest in QUANT_TYPES


@pytest.mark.parametrize("text", ["", "w8", "a8w8", "w8a8c4", "w8a8 ", "W8A8", "w8a8-g128", "w8a8\n"])
def test_what_is_no_label(text: str) -> None:
    with pytest.raises(RecipeError, match=f"quant type {re.escape(repr(text))} is not w<bits>a<bits>.*such as w8a8"):
        parse_quant_type(text)


def write(folder: Path, name: str, labels: str, more: str = "") -> Path:
    path = folder / f"{name}.toml"
    rule = '[[rule]]\nroles = ["experts.up"]\nscheme = "w8a8-g128"\n'
    path.write_text(f'name = "{name}"\n{labels}\n{rule}{more}', encoding="utf-8")
    return path


def test_a_family_comes_before_the_general_recipe(tmp_path: Path) -> None:
    write(tmp_path, "general", 'quant_type = "w8a8"')
    write(tmp_path, "hunyuan", 'quant_type = "w8a8"\nfamilies = ["hy_v3", "hy_v4"]')
    write(tmp_path, "by-name-only", "")
    chosen = {family: recipe_for("w8a8", family, folder=tmp_path).name for family in ("hy_v3", "hy_v4", "olmoe")}
    assert chosen == {"hy_v3": "hunyuan", "hy_v4": "hunyuan", "olmoe": "general"}
    with pytest.raises(RecipeError, match=r"no recipe for quant type 'w4a8' and family 'olmoe'; there are w8a8 \(each"):
        recipe_for("w4a8", "olmoe", folder=tmp_path)


@pytest.mark.parametrize("labels", ['quant_type = "w8a8"', 'quant_type = "w8a8"\nfamilies = ["olmoe"]'])
def test_two_recipes_for_one_family(tmp_path: Path, labels: str) -> None:
    write(tmp_path, "first", labels)
    write(tmp_path, "second", labels)
    with pytest.raises(RecipeError, match="recipes first and second both claim quant type 'w8a8' and family 'olmoe'"):
        recipe_for("w8a8", "olmoe", folder=tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ('quant_type = "w4a8"', "quant_type 'w4a8': no rule has a scheme w4a8-..."),
        ('quant_type = "w8a8c8"', "quant_type 'w8a8c8': no rule has a scheme w8a8c8-..."),
        ('families = ["olmoe"]', "families are what a quant type is chosen for, but there is no quant_type"),
        ('quant_type = "w8a8"\nfamilies = ["glm4"]', "unknown family glm4; known: .*glm4_moe"),
    ],
)
def test_wrong_labels(tmp_path: Path, labels: str, message: str) -> None:
    path = write(tmp_path, "mine", labels)
    with pytest.raises(RecipeError, match=f"{path}: {message}"):
        read_recipe(path)


def test_evidence(tmp_path: Path) -> None:
    path = write(tmp_path, "mine", "", MEASURED.format(sha="a" * 64) * 2 + "kl = 0.01\nrouter_agreement = 0.96\n")
    first, second = read_recipe(path).evidence
    assert (first.tokens, first.perplexity_increase, first.kl) == (17408, 0.004, None)
    assert (second.kl, second.router_agreement) == (0.01, 0.96)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tokens = 17408", "tokens = 0", "tokens = 0 cannot be"),
        ("perplexity_increase = 0.004", "perplexity_increase = nan", "perplexity_increase = nan cannot be"),
        ("perplexity_increase = 0.004", "perplexity_increase = -1.0", "perplexity_increase = -1.0 cannot be"),
        ("tokens", "kl = -0.1\ntokens", "kl = -0.1 cannot be"),
        ("tokens", "router_agreement = 96.4\ntokens", "router_agreement = 96.4 cannot be"),
        ("2026-11-30", "30.11.2026", "date = '30.11.2026' cannot be"),
        ("2026-11-30", "2026-W48-1", "date = '2026-W48-1' cannot be"),
        ("a" * 64, "a" * 63, "data_sha256 = 'a+' cannot be"),
    ],
)
def test_evidence_that_cannot_be(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, "mine", "", MEASURED.format(sha="a" * 64).replace(old, new))
    with pytest.raises(RecipeError, match=f"{path}: evidence of smollm2-moe: {message}"):
        read_recipe(path)


def test_evidence_is_decoded_strictly(tmp_path: Path) -> None:
    path = write(tmp_path, "mine", "", MEASURED.format(sha="a" * 64).replace("tokens", "token"))
    with pytest.raises(ConfigError, match=r"evidence\[0\]: unknown key token"):
        read_recipe(path)
