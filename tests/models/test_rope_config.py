"""Rotary settings in all dialects: what they mean, and what is refused."""

import math
from typing import Any

import pytest

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.registry import FAMILIES
from jaxmoe.nn.config import LatentAttentionConfig, YarnConfig
from tests.tiny import DROP, read

GLM, HUNYUAN, V3 = "glm4_moe", "hunyuan_v1_moe", "deepseek_v3"
LATENT = ("deepseek_v2", V3, "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_k25")

# Rotary settings. Case 75: every dialect with the base and the rotated dims that it means. The tiny head has 16 dims.

NTK = 10000.0 * 1000.0 ** (16 / 14)
FLAT = {"rope_parameters": DROP, "rope_theta": 5e5}

ROPE: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "nested": (GLM, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, 8),
    "nested, partial": (GLM, {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25}}, 5e5, 4),
    "nested, old word": (GLM, {"rope_parameters": {"rope_theta": 5e5, "type": "default"}}, 5e5, 8),
    "nested, both words": (
        GLM,
        {"rope_parameters": {"rope_theta": 5e5, "type": "default", "rope_type": "default"}},
        5e5,
        8,
    ),
    "nested, partial at the top": (
        GLM,
        {"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": 1.0},
        5e5,
        16,
    ),
    "nested, null partial": (GLM, {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": None}}, 5e5, 8),
    "nested and flat, alike": (GLM, {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}, 5e5, 8),
    "whole number": (GLM, {"rope_parameters": {"rope_theta": 500000}}, 5e5, 8),
    "flat": (GLM, FLAT, 5e5, 8),
    "flat, null": (GLM, {**FLAT, "rope_scaling": None}, 5e5, 8),
    "flat, empty": (GLM, {**FLAT, "rope_scaling": {}}, 5e5, 8),
    "flat, default": (GLM, {**FLAT, "rope_scaling": {"rope_type": "default"}}, 5e5, 8),
    "flat, old word": (GLM, {**FLAT, "rope_scaling": {"type": "default"}}, 5e5, 8),
    "flat, factor of one": (GLM, {**FLAT, "rope_scaling": {"type": "default", "factor": 1.0}}, 5e5, 8),
    "flat, partial": (GLM, {**FLAT, "partial_rotary_factor": 0.75}, 5e5, 12),
    "flat, null table": (GLM, {**FLAT, "rope_parameters": None}, 5e5, 8),
    "equal for all kinds of layers": (
        GLM,
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}},
        5e5,
        8,
    ),
    "one kind of layer, another null": (
        GLM,
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5, "type": "default"}, "sliding_attention": None}},
        5e5,
        8,
    ),
    "by kind of layer, base at the top": (
        GLM,
        {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25}}, "rope_theta": 5e5},
        5e5,
        4,
    ),
    "whole head by default": (HUNYUAN, {"rope_parameters": {"rope_theta": 5e5}}, 5e5, 16),
    "alpha, nested": (
        HUNYUAN,
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
        NTK,
        16,
    ),
    "alpha, flat": (
        HUNYUAN,
        {"rope_parameters": DROP, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
        NTK,
        16,
    ),
    "alpha, released": (
        HUNYUAN,
        {
            "rope_parameters": DROP,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
        },
        NTK,
        16,
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_case_75_rope_dialects(name: str) -> None:
    family, changes, theta, rotary_dim = ROPE[name]
    rope = read(family, changes).attention.rope
    assert (rope.theta, rope.rotary_dim) == (pytest.approx(theta, rel=1e-12), rotary_dim)
    assert rope.yarn is None and not rope.interleaved


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": DROP},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": DROP, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
    ],
    ids=["absent", "null", "nested", "flat", "by layer type"],
)
def test_case_76_theta_is_never_defaulted(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="config.json: (text_config: )?rope_theta is missing"):
        read(family, changes)


@pytest.mark.parametrize("kind", ["linear", "longrope", "llama3", "mrope"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_kinds_of_scaling_are_refused(family: str, kind: str) -> None:
    for changes in (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": kind, "factor": 4.0}},
        {**FLAT, "rope_scaling": {"type": kind, "factor": 4.0, "original_max_position_embeddings": 32768}},
    ):
        with pytest.raises(UnsupportedError, match=f"rope type '{kind}' is not supported for this family"):
            read(family, changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (GLM, {"rope_theta": 5.0}, "rope_theta is given as 5.0 and 1000000.0"),
        (GLM, {"rope_scaling": {"rope_theta": 5.0}}, "rope_theta is given as 5.0 and 1000000.0"),
        (GLM, {"partial_rotary_factor": 0.25}, "partial_rotary_factor is given as 0.25 and 0.5"),
        (GLM, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type is given as 'default' and 'yarn'"),
        (
            GLM,
            {"rope_parameters": {"rope_theta": 1e4, "type": "yarn", "rope_type": "default"}},
            "rope type is given as 'default' and 'yarn'",
        ),
        (GLM, {**FLAT, "rope_scaling": {"factor": 4.0}}, "rope factor 4.0 without a rope type that uses it"),
        (GLM, {"rope_parameters": {"rope_theta": "1e6"}}, "rope_parameters: rope_theta = '1e6' is not a float"),
        (GLM, {"rope_parameters": {"rope_theta": [1e6]}}, "rope_parameters: rope_theta = [1000000.0] is not a float"),
        (GLM, {"rope_parameters": {"rope_theta": 0}}, "rope_theta 0.0 is not above 0 and finite"),
        (GLM, {"rope_parameters": []}, "rope_parameters = [] is not a dict"),
        (GLM, {"rope_parameters": {"rope_theta": 1e6, "beta_fast": 32}}, "rope_parameters: unknown key beta_fast"),
        (
            GLM,
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e6, "alpha": 2.0}},
            "unknown key alpha",
        ),
        (GLM, {"head_dim": 6}, "partial_rotary_factor 0.5 of head_dim 6 gives 3 dims"),
        (GLM, {**FLAT, "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of head_dim 16 gives 24 dims"),
        (GLM, {**FLAT, "partial_rotary_factor": 0.0}, "partial_rotary_factor 0.0 of head_dim 16 gives 0 dims"),
        (GLM, {**FLAT, "partial_rotary_factor": float("inf")}, "partial_rotary_factor inf of head_dim 16 gives 0 dims"),
        (
            HUNYUAN,
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": -1.0}},
            "dynamic rope with alpha -1.0 and head_dim 16 has no base",
        ),
        (HUNYUAN, {"head_dim": 2}, "dynamic rope with alpha 1000.0 and head_dim 2 has no base"),
    ],
)
def test_rope_settings_that_make_no_sense_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(family, changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        (
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}},
            UnsupportedError,
            "rope_parameters differs between full_attention and sliding_attention; only equal settings are supported",
        ),
        (
            {"full_attention": {"rope_theta": 1e4}, "rope_theta": 1e4},
            ConfigError,
            "rope_parameters mixes settings with tables for kinds of layers",
        ),
    ],
)
def test_settings_by_kind_of_layer_must_agree(tables: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read(GLM, {"rope_parameters": tables})


@pytest.mark.parametrize("table", [{"factor": 2.0}, {"alpha": 1000.0, "factor": 2.0}, {}])
def test_dynamic_rope_without_alpha_is_refused(table: dict[str, float]) -> None:
    """The dynamic kind proper depends on the length of the sequence."""
    with pytest.raises(UnsupportedError, match="dynamic rope with alpha .* only alpha is supported"):
        read(HUNYUAN, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", **table}})


def test_alpha_belongs_to_hunyuan() -> None:
    with pytest.raises(UnsupportedError, match="rope type 'dynamic' is not supported for this family"):
        read(GLM, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 1000.0}})


# Yarn.

FULL = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64}


def m(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


@pytest.mark.parametrize(
    ("changes", "factor", "scale"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, m(40, 1) ** 2),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, m(40, 0.707) ** 2),
        ({"mscale": 1.0, "mscale_all_dim": 0.707}, m(40, 1) / m(40, 0.707), m(40, 0.707) ** 2),
        ({"mscale": 1.0}, m(40, 1), 1.0),
        ({"mscale_all_dim": 1.0}, m(40, 1), m(40, 1) ** 2),
        ({"mscale": 0.0, "mscale_all_dim": 1.0}, m(40, 1), m(40, 1) ** 2),
        ({"mscale": 1.0, "mscale_all_dim": 0}, m(40, 1), 1.0),
        ({}, m(40, 1), 1.0),
        ({"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.5, m(40, 1) ** 2),
        ({"factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.0, 1.0),
    ],
    ids=[
        "equal",
        "equal, V2",
        "unequal",
        "no all_dim",
        "no mscale",
        "mscale 0",
        "all_dim 0",
        "none",
        "given",
        "shrunk",
    ],
)
@pytest.mark.parametrize("family", LATENT)
def test_cases_72_to_74_yarn_factors(family: str, changes: dict[str, float], factor: float, scale: float) -> None:
    """mscale acts on cosine and sine, mscale_all_dim on the scores of a 24-wide head, whatever the latent's width."""
    attention = read(family, {"rope_parameters": {**FULL, **changes}}).attention
    assert isinstance(attention, LatentAttentionConfig) and attention.rope.yarn
    assert attention.rope.yarn.attention_factor == pytest.approx(factor, rel=1e-15)
    assert attention.scale == pytest.approx(24**-0.5 * scale, rel=1e-15)
    assert attention.rope.rotary_dim == 8


YARN: dict[str, tuple[dict[str, Any], YarnConfig]] = {
    "nested": (
        {"rope_parameters": {**FULL, "beta_fast": 8, "beta_slow": 2.0, "truncate": False}},
        YarnConfig(
            factor=40.0,
            original_positions=64,
            beta_fast=8.0,
            beta_slow=2.0,
            truncate=False,
            attention_factor=m(40, 1),
        ),
    ),
    "defaults": (
        {"rope_parameters": FULL},
        YarnConfig(factor=40.0, original_positions=64, attention_factor=m(40, 1)),
    ),
    "flat, old word": (
        {
            **FLAT,
            "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "mscale": None},
        },
        YarnConfig(factor=4.0, original_positions=128, attention_factor=m(4, 1)),
    ),
    "trained for the longest context": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        YarnConfig(factor=4.0, original_positions=512, attention_factor=m(4, 1)),
    ),
    "trained context at the top": (
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        },
        YarnConfig(factor=4.0, original_positions=256, attention_factor=m(4, 1)),
    ),
    "by kind of layer": (
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": dict(FULL)}},
        YarnConfig(factor=40.0, original_positions=64, attention_factor=m(40, 1)),
    ),
}


@pytest.mark.parametrize("name", YARN)
def test_case_75_yarn_dialects(name: str) -> None:
    changes, yarn = YARN[name]
    assert read(GLM, changes).attention.rope.yarn == yarn


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_stretch_by_yarn(family: str) -> None:
    yarn = read(family, {"rope_parameters": FULL}).attention.rope.yarn
    assert yarn and (yarn.factor, yarn.original_positions) == (40.0, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": None}, "yarn rope without a factor"),
        ({"factor": -1.0}, "yarn factor -1.0 is not positive and finite"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings 0 is not positive and finite"),
        ({"beta_fast": 0.0}, "yarn beta_fast 0.0 is not positive and finite"),
        ({"attention_factor": float("nan")}, "yarn attention_factor nan is not positive and finite"),
        ({"rope_theta": 1.0}, "rope_theta 1.0 is not above 1 and finite"),
        ({"truncate": 1}, "truncate = 1 is not a bool"),
        ({"extrapolation_factor": 1.0}, "rope_parameters: unknown key extrapolation_factor"),
    ],
)
def test_yarn_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(GLM, {"rope_parameters": {**FULL, **changes}})


def test_a_context_given_twice_must_be_given_alike() -> None:
    with pytest.raises(ConfigError, match="original_max_position_embeddings is given as 64 and 128"):
        read(GLM, {"rope_parameters": FULL, "original_max_position_embeddings": 128})


def test_all_rotary_dims_of_latent_attention_rotate() -> None:
    assert read(V3, {"partial_rotary_factor": 1.0}) == read(V3, {})
    with pytest.raises(UnsupportedError, match="4 of the 8 rotary dims rotate, only all can"):
        read(V3, {"partial_rotary_factor": 0.5})


def test_gpt_oss_does_not_round_its_dims() -> None:
    yarn = read("gpt_oss", {}).attention.rope.yarn
    assert yarn == YarnConfig(factor=32.0, original_positions=64, truncate=False, attention_factor=m(32, 1))
