"""The strict reader: what nobody asked for, what is missing and what this version cannot do are refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.family import IGNORED_KEYS
from jaxmoe.models.registry import FAMILIES, read_config, read_config_file
from jaxmoe.nn.config import DecoderConfig
from tests import tiny

GLM, HUNYUAN = "glm4_moe", "hunyuan_v1_moe"
DROP = object()
"""As a value: the key is left out."""
PRESETS = sorted(path.name for path in asset("configs", "models").glob("*.json"))

REQUIRED = {
    GLM: (
        "first_k_dense_replace",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
    ),
    HUNYUAN: (
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "moe_topk",
        "num_attention_heads",
        "num_experts",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
    ),
}


def read(family: str, changes: Mapping[str, Any]) -> DecoderConfig:
    data = {**tiny.CONFIGS[family], **changes}
    found, config = read_config({key: value for key, value in data.items() if value is not DROP}, "config.json")
    assert found is FAMILIES[family]
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_configs_cover_the_families(family: str) -> None:
    config = read(family, {})
    assert (config.family, config.vocab, config.embed, config.layers) == (family, 256, 64, 3)
    assert (config.attention.heads, config.attention.kv_heads, config.attention.head_dim) == (4, 2, 16)
    assert (config.moe.router.experts, config.moe.router.top_k) == (8, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="config.json: unknown key attention_sink, n_hash_layers: "):
        read(family, {"n_hash_layers": 3, "attention_sink": None})


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in REQUIRED.items() for key in keys])
def test_a_required_key_is_never_defaulted(family: str, key: str) -> None:
    for absent in (DROP, None):
        with pytest.raises(ConfigError, match=f"config.json: missing key {key}$"):
            read(family, {key: absent})


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in REQUIRED.items() for key in keys])
def test_a_wrong_type_is_refused_by_name(family: str, key: str) -> None:
    for wrong in ("8", True, {"default": 8}):
        with pytest.raises(ConfigError, match=f"config.json: {key} = .* is not a "):
            read(family, {key: wrong})


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        (GLM, "hidden_size", 0, "hidden_size = 0 is below 1"),
        (GLM, "hidden_size", 64.0, "hidden_size = 64.0 is not a int"),
        (GLM, "first_k_dense_replace", -1, "first_k_dense_replace = -1 is negative"),
        (GLM, "n_shared_experts", -1, "n_shared_experts = -1 is negative"),
        (GLM, "rms_norm_eps", float("nan"), "rms_norm_eps = nan is not positive and finite"),
        (GLM, "rms_norm_eps", -1e-5, "rms_norm_eps = -1e-05 is not positive and finite"),
        (GLM, "routed_scaling_factor", float("inf"), "routed_scaling_factor = inf is not positive and finite"),
        (GLM, "use_qk_norm", 1, "use_qk_norm = 1 is not a bool"),
        (GLM, "attention_bias", "true", "attention_bias = 'true' is not a bool"),
        (GLM, "num_key_value_heads", 3, "4 heads are no multiple of 3 key-value heads"),
        (GLM, "num_experts_per_tok", 9, "top-9 of 8 experts"),
        (GLM, "n_group", 3, "8 experts in 3 groups, of which 1"),
        (GLM, "topk_group", 2, "8 experts in 1 groups, of which 2"),
        (GLM, "n_group", 8, "8 groups of one expert; a group is ranked by its two best experts"),
        (HUNYUAN, "moe_topk", 0, "moe_topk = 0 is below 1"),
        (HUNYUAN, "moe_topk", [], "moe_topk has 0 entries for 3 layers"),
        (HUNYUAN, "moe_topk", [2, 2], "moe_topk has 2 entries for 3 layers"),
        (HUNYUAN, "moe_topk", [True] * 3, "moe_topk = [True, True, True] is not a list of whole numbers"),
        (HUNYUAN, "num_shared_expert", [-1] * 3, "num_shared_expert = -1 is below 0"),
        (HUNYUAN, "moe_topk", ["2"] * 3, "moe_topk = ['2', '2', '2'] is not a list of whole numbers"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(family: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(family, {key: value})
    assert str(caught.value) == f"config.json: {message}"


def test_groups_that_hold_too_few_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 groups hold fewer than 3 experts"):
        read(GLM, {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        (GLM, "hidden_act", "gelu"),
        (GLM, "attention_dropout", 0.1),
        (HUNYUAN, "hidden_act", "gelu"),
        (HUNYUAN, "use_cla", True),
        (HUNYUAN, "use_mla", True),
        (HUNYUAN, "use_qk_norm", False),
        (HUNYUAN, "attention_bias", True),
        (HUNYUAN, "mlp_bias", True),
        (HUNYUAN, "kv_lora_rank", 512),
        (HUNYUAN, "moe_drop_tokens", True),
        (HUNYUAN, "moe_layer_num_skipped", 1),
        (HUNYUAN, "norm_topk_prob", False),
        (HUNYUAN, "norm_type", "layer"),
        (HUNYUAN, "position_embedding_xdrope", True),
        (HUNYUAN, "routed_scaling_factor", 2.5),
        (HUNYUAN, "use_mixed_mlp_moe", False),
        (HUNYUAN, "use_rotary_pos_emb", False),
        (HUNYUAN, "moe_topk", [2, 2, 3]),
        (HUNYUAN, "moe_intermediate_size", 32),
    ],
)
def test_options_that_are_not_built_are_refused_by_name(family: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"config.json: {key} .*(not supported|only|differs)"):
        read(family, {key: value})


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="3 of 3 layers are dense; no experts left"):
        read(GLM, {"first_k_dense_replace": 3})


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_change_nothing_change_nothing(family: str) -> None:
    ignored = {key: "anything" for key in IGNORED_KEYS if key != "model_type"}
    assert read(family, ignored) == read(family, {})


def test_multi_token_prediction_and_hunyuan_dropout_change_nothing() -> None:
    assert read(GLM, {"num_nextn_predict_layers": 1}) == read(GLM, {})
    assert read(HUNYUAN, {"attention_dropout": 0.1, "cla_share_factor": 2, "vit_path": None}) == read(HUNYUAN, {})


def test_an_unsupported_family_comes_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedError, match="model_type 'llama' is not supported; supported: glm4_moe, hunyuan_v1_"):
        read_config({"model_type": "llama"}, "config.json")


@pytest.mark.parametrize("model_type", [None, 3, ["glm4_moe"]])
def test_a_model_type_that_is_no_text_is_refused(model_type: Any) -> None:
    with pytest.raises(ConfigError, match="config.json: no model_type"):
        read_config({"model_type": model_type}, "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json does not exist"),
        ("{", "is not readable as JSON"),
        ("[]", "holds a list where an object was expected"),
    ],
)
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_config_file(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder; give the folder of a Hugging Face checkpoint"):
        read_config_file(tmp_path / "none")


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": DROP},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": DROP, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
    ],
    ids=["absent", "null", "nested", "flat", "by layer type"],
)
def test_case_76_theta_is_never_defaulted(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="config.json: rope_theta is missing"):
        read(family, changes)


@pytest.mark.parametrize("kind", ["yarn", "linear", "longrope", "llama3", "mrope"])
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
        (GLM, {"rope_parameters": {"rope_theta": 0}}, "rope_theta 0.0 is not positive and finite"),
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


@pytest.mark.parametrize("table", [{"factor": 2.0}, {"alpha": 1000.0, "factor": 2.0}, {}])
def test_dynamic_rope_without_alpha_is_refused(table: dict[str, float]) -> None:
    """The dynamic kind proper depends on the length of the sequence."""
    with pytest.raises(UnsupportedError, match="dynamic rope with alpha .* only alpha is supported"):
        read(HUNYUAN, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", **table}})


def test_alpha_belongs_to_hunyuan() -> None:
    with pytest.raises(UnsupportedError, match="rope type 'dynamic' is not supported for this family"):
        read(GLM, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 1000.0}})


# Released models.


def preset(name: str) -> dict[str, Any]:
    return json.loads(asset("configs", "models", name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads(name: str) -> None:
    family, config = read_config(preset(name), name)
    assert family.name == config.family == preset(name)["model_type"]
    assert asset("configs", "models", "README.md").read_text(encoding="utf-8").count(f"`{name}`") == 1


def test_glm_4_5() -> None:
    _, config = read_config(preset("glm-4.5.json"), "glm-4.5.json")
    router = config.moe.router
    assert (config.layers, config.dense_layers, config.ffn, config.embed) == (92, 3, 12288, 5120)
    assert (router.experts, router.top_k, router.score, router.scaling) == (160, 8, "sigmoid", 2.5)
    assert (router.correction_bias, router.renormalize, router.groups) == (True, True, 1)
    assert (config.attention.bias, config.attention.qk_norm) == (True, "before_rope")
    assert (config.attention.rope.theta, config.attention.rope.rotary_dim) == (1e6, 64)


def test_glm_4_5_air() -> None:
    _, config = read_config(preset("glm-4.5-air.json"), "glm-4.5-air.json")
    assert (config.layers, config.dense_layers, config.ffn, config.embed) == (46, 1, 10944, 4096)
    assert (config.moe.expert_ffn, config.moe.shared_ffn, config.moe.router.scaling) == (1408, 1408, 1.0)
    assert (config.attention.bias, config.attention.qk_norm) == (True, "none")


def test_hunyuan_a13b_as_released() -> None:
    """Lists with an entry a layer, attention_head_dim, and an alpha beside leftovers of yarn."""
    data = preset("hunyuan-a13b.json")
    assert data["moe_topk"] == [8] * 32 and data["moe_intermediate_size"] == [3072] * 32 and "head_dim" not in data
    _, config = read_config(data, "hunyuan-a13b.json")
    assert (config.layers, config.dense_layers, config.vocab, config.tied_head) == (32, 0, 128167, True)
    assert (config.moe.router.experts, config.moe.router.top_k, config.moe.router.score) == (64, 8, "softmax")
    assert (config.moe.expert_ffn, config.moe.shared_ffn) == (3072, 3072)
    assert (config.attention.head_dim, config.attention.qk_norm) == (128, "after_rope")
    # The base that llama.cpp computes for the same model (freq_base_train of its converter).
    assert config.attention.rope.theta == pytest.approx(11158839.9251, rel=1e-10)


@pytest.mark.parametrize("source", [*FAMILIES, *PRESETS])
def test_what_transformers_saves_again_reads_the_same(source: str, tmp_path: Path) -> None:
    """transformers moves rope settings, fills defaults in and writes nulls."""
    from transformers import AutoConfig

    data = tiny.CONFIGS[source] if source in FAMILIES else preset(source)
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert set(again) != set(data)
    assert read_config(again, "again")[1] == read_config(data, "first")[1]
