"""The strict reader: what nobody asked for, what is missing and what this version cannot do are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.family import IGNORED_KEYS
from jaxmoe.models.registry import FAMILIES, read_config, read_config_file
from jaxmoe.nn.config import AttentionConfig, DecoderConfig, HyperConfig, LatentAttentionConfig
from tests import tiny
from tests.tiny import DROP, read

GLM, HUNYUAN, V2, V3, DSA, HY4 = "glm4_moe", "hunyuan_v1_moe", "deepseek_v2", "deepseek_v3", "glm_moe_dsa", "hy_v4"

BODY = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
DEEPSEEK_EXPERTS = (
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
)
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", *DEEPSEEK_EXPERTS)
GROUPS = ("n_group", "topk_group")
INDEXER = ("index_head_dim", "index_n_heads", "index_topk")
REQUIRED = {
    "deepseek_v2": ("first_k_dense_replace", *LATENT, *GROUPS),
    "deepseek_v3": ("first_k_dense_replace", *LATENT, *GROUPS),
    "deepseek_v32": (*LATENT, *GROUPS, *INDEXER),
    "dots1": ("first_k_dense_replace", *DEEPSEEK_EXPERTS[:-1]),
    "ernie4_5_moe": (
        "intermediate_size",
        "moe_intermediate_size",
        "moe_layer_start_index",
        "moe_num_experts",
        "moe_num_shared_experts",
        "num_key_value_heads",
    ),
    "glm4_moe": ("first_k_dense_replace", "intermediate_size", "num_key_value_heads", *DEEPSEEK_EXPERTS[:-1]),
    "glm4_moe_lite": ("intermediate_size", *LATENT),
    "glm_moe_dsa": ("intermediate_size", *LATENT, *INDEXER),
    "gpt_oss": ("intermediate_size", "num_key_value_heads", "num_local_experts", "swiglu_limit"),
    "hunyuan_v1_moe": ("intermediate_size", "moe_topk", "num_experts"),
    "hy_v3": (
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "num_key_value_heads",
        "num_shared_experts",
        "router_scaling_factor",
    ),
    "hy_v4": ("intermediate_size", *LATENT, *INDEXER),
    "kimi_k25": ("first_k_dense_replace", *LATENT, *GROUPS),
    "minimax_m2": ("intermediate_size", "num_key_value_heads", "num_local_experts"),
    "mixtral": ("intermediate_size", "num_local_experts"),
    "olmoe": ("intermediate_size", "num_experts"),
    "qwen3_moe": ("moe_intermediate_size", "num_key_value_heads"),
}
"""Beside `BODY`."""
REQUIRED_KEYS = [(family, key) for family, keys in REQUIRED.items() for key in (*BODY, *keys)]
_TWICE = "moe_intermediate_size = 32 and expert_hidden_dim = 16 are names of one setting, give one of them"
SPARSE_ONLY = ("gpt_oss", "hunyuan_v1_moe", "minimax_m2", "mixtral", "olmoe", "qwen3_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_configs_cover_the_families(family: str) -> None:
    config = read(family, {})
    assert (config.family, config.vocab, config.embed, config.attention.heads) == (family, 256, 64, 4)
    assert (config.moe.router.experts, config.moe.router.top_k) == (8, 2)
    assert config.layers >= 3 and config.dense_layers == (family not in SPARSE_ONLY)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="config.json: (text_config: )?unknown key attention_sink, n_hash_layers: "):
        read(family, {"n_hash_layers": 3, "attention_sink": None})


@pytest.mark.parametrize(("family", "key"), REQUIRED_KEYS)
def test_a_required_key_is_never_defaulted(family: str, key: str) -> None:
    for absent in (DROP, None):
        with pytest.raises(ConfigError, match=f"config.json: (text_config: )?missing key {key}$"):
            read(family, {key: absent})


@pytest.mark.parametrize(("family", "key"), REQUIRED_KEYS)
def test_a_wrong_type_is_refused_by_name(family: str, key: str) -> None:
    for wrong in ("8", True, {"default": 8}):
        with pytest.raises(ConfigError, match=f"config.json: (text_config: )?{key} = .* is not a "):
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
        (V3, "q_lora_rank", 0, "q_lora_rank = 0 is below 1"),
        (V3, "q_lora_rank", DROP, "missing key q_lora_rank (null: queries have no latent)"),
        (V2, "n_group", 16, "8 experts in 16 groups, of which 2"),
        (DSA, "first_k_dense_replace", 2, "mlp_layer_types has 1 dense layers, first_k_dense_replace is 2"),
        (DSA, "mlp_layer_types", ["dense"], "mlp_layer_types has 1 entries for 6 layers"),
        (DSA, "indexer_types", ["full"] * 5, "indexer_types has 5 entries for 6 layers"),
        (DSA, "indexer_types", ["shared"] * 6, "layer 0 shares an indexer, but there is no layer before it"),
        (DSA, "index_head_dim", 4, "index_head_dim 4 is below the 8 dims that rotate"),
        (HY4, "layer_types", "indexed_attention", "layer_types = 'indexed_attention' is not a list"),
        (HY4, "swiglu_limit", float("nan"), "swiglu_limit = nan is not positive and finite"),
        (HY4, "hc_mult", 0, "hc_mult = 0 is below 1"),
        ("gpt_oss", "sliding_window", None, "layer_types has sliding_attention, but sliding_window is None"),
        ("hy_v3", "expert_hidden_dim", 16, _TWICE),
        ("mixtral", "sliding_window", 0, "sliding_window = 0 is below 1"),
        ("minimax_m2", "rotary_dim", 4, "rotary_dim is 4, but partial_rotary_factor gives 8"),
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
        *((family, "hidden_act", "gelu") for family in FAMILIES if family != "kimi_k25"),
        *((family, "is_encoder_decoder", True) for family in FAMILIES if family != "kimi_k25"),
        (GLM, "attention_dropout", 0.1),
        (V2, "attention_bias", True),
        (V2, "mlp_bias", True),
        (V2, "moe_layer_freq", 2),
        (V2, "norm_topk_prob", True),
        (V2, "num_key_value_heads", 1),
        (V2, "qk_head_dim", 16),
        (V2, "scoring_func", "sigmoid"),
        (V2, "topk_method", "noaux_tc"),
        (V3, "moe_layer_freq", 2),
        (V3, "moe_router_dtype", "bfloat16"),
        (V3, "scoring_func", "softmax"),
        (V3, "topk_method", "greedy"),
        ("deepseek_v32", "indexer_rope_interleave", True),
        ("deepseek_v32", "layer_types", ["full_attention"] * 4),
        (DSA, "indexer_rope_interleave", False),
        (DSA, "indexer_types", ["full", "none", "shared", "shared", "full", "shared"]),
        (DSA, "rope_interleave", False),
        ("dots1", "layer_types", ["chunked_attention"] * 3),
        ("dots1", "mlp_layer_types", ["dense", "sparse", "dense"]),
        ("ernie4_5_moe", "moe_gate_act", "sigmoid"),
        ("ernie4_5_moe", "moe_layer_end_index", 1),
        ("ernie4_5_moe", "moe_layer_interval", 2),
        ("ernie4_5_moe", "moe_use_aux_free", False),
        ("ernie4_5_moe", "use_bias", True),
        ("gpt_oss", "initial_context_length", 32),
        ("gpt_oss", "swiglu_alpha", 1.0),
        (HY4, "enable_ihc", False),
        (HY4, "gated_mla", False),
        (HY4, "gating_type", "headwise"),
        (HY4, "learnable_sink", False),
        ("hy_v3", "mlp_bias", True),
        ("hy_v3", "moe_router_use_sigmoid", False),
        ("hy_v3", "qk_norm", False),
        ("hy_v3", "route_norm", False),
        ("minimax_m2", "attn_type_list", [1, 0, 1]),
        ("minimax_m2", "layernorm_mlp_alpha", 3.5),
        ("minimax_m2", "qk_norm_type", "per_head"),
        ("minimax_m2", "shared_intermediate_size", 32),
        ("minimax_m2", "use_routing_bias", False),
        ("olmoe", "clip_qkv", 8.0),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen3_moe", "use_sliding_window", True),
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
    with pytest.raises(UnsupportedError, match=f"config.json: {key} .*(support|only|differs)"):
        read(family, {key: value})


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="3 of 3 layers are dense; no experts left"):
        read(GLM, {"first_k_dense_replace": 3})


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_change_nothing_change_nothing(family: str) -> None:
    ignored = {key: "anything" for key in IGNORED_KEYS if key != "model_type"}
    assert read(family, ignored) == read(family, {})


def test_hunyuan_dropout_changes_nothing() -> None:
    assert read(HUNYUAN, {"attention_dropout": 0.1, "cla_share_factor": 2, "vit_path": None}) == read(HUNYUAN, {})


def test_an_unsupported_family_comes_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_config({"model_type": "llama"}, "config.json")
    known = ", ".join([*FAMILIES, "hunyuan", "kimi_k2"])
    assert str(caught.value) == f"config.json: model_type 'llama' is not supported; supported: {known}"


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


# What each family's options mean.


def test_queries_without_a_latent() -> None:
    assert latent(read(V2, {"q_lora_rank": None})).q_lora == 0
    with pytest.raises(UnsupportedError, match="q_lora_rank is null, but the indexer reads the query latent"):
        read(DSA, {"q_lora_rank": None})


def test_latent_sizes_and_scale() -> None:
    attention = latent(read("glm4_moe_lite", {}))
    assert (attention.q_lora, attention.kv_lora, attention.v_dim) == (48, 32, 16)
    assert (attention.nope_dim, attention.rope_dim, attention.rope.rotary_dim) == (16, 8, 8)
    assert attention.scale == 24**-0.5
    # As vLLM and SGLang do; transformers takes 1e-6 for these norms whatever the file says.
    assert attention.norm_eps == 1e-5


@pytest.mark.parametrize("family", [V3, "glm4_moe_lite", "kimi_k25"])
def test_rope_interleave_is_honoured(family: str) -> None:
    assert latent(read(family, {})).rope.interleaved
    assert latent(read(family, {"rope_interleave": DROP})).rope.interleaved
    assert not latent(read(family, {"rope_interleave": False})).rope.interleaved


def test_the_three_layouts_of_an_indexer() -> None:
    found = {family: latent(read(family, {})).indexer for family in ("deepseek_v32", DSA, HY4)}
    layouts = {name: (indexer.interleaved, indexer.rotates_last) for name, indexer in found.items() if indexer}
    assert layouts == {"deepseek_v32": (False, False), DSA: (True, False), HY4: (True, True)}
    assert all(latent(read(family, {})).rope.interleaved for family in found)
    for indexer in found.values():
        assert indexer and (indexer.heads, indexer.head_dim, indexer.top_k, indexer.norm_eps) == (32, 16, 8, 1e-6)


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, (0, 1, 4)),
        ({"indexer_types": DROP}, (0, 1, 2, 3, 4, 5)),
        ({"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2)),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 3}, (0, 1, 2, 4)),
        ({"indexer_types": None, "index_topk_freq": 2}, (0, 1, 3, 5)),
        ({"indexer_types": None, "index_topk_freq": 0}, (0, 1, 2, 3, 4, 5)),
        ({"indexer_types": None, "index_topk_pattern": "FSSFSS"}, (0, 3)),
        ({"index_topk_freq": 4, "index_topk_pattern": "FFSSFS"}, (0, 1, 4)),
    ],
)
def test_glm_indexer_schedules(changes: dict[str, Any], full: tuple[int, ...]) -> None:
    """As transformers' GlmMoeDsaConfig derives them."""
    indexer = latent(read(DSA, changes)).indexer
    assert indexer and indexer.full_layers == full


def test_a_list_that_contradicts_the_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"indexer_types gives layers \[0, 1, 4\] an indexer, the schedule"):
        read(DSA, {"index_topk_freq": 4})


@pytest.mark.parametrize("pattern", ["FSS", "FSSFSX"])
def test_a_pattern_that_fits_no_layers_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="index_topk_pattern is not an F or S for each of 6 layers"):
        read(DSA, {"indexer_types": None, "index_topk_pattern": pattern})


def test_hy4_without_lists_is_what_its_class_says() -> None:
    config = read(HY4, {"indexer_types": DROP, "mlp_layer_types": DROP, "layer_types": DROP})
    assert config == read(HY4, {})
    assert config.dense_layers == 1 and config.hyper == HyperConfig(streams=4, magnitude=2.0, epsilon=1e-6)
    attention = latent(config)
    assert attention.gate and attention.sinks and attention.indexer and attention.indexer.full_layers == (0, 1, 5)
    assert config.moe.limit == 0.5 and config.moe.activation == "swiglu"
    assert read(HY4, {"swiglu_limit": 0.0}).moe.limit is None
    assert read(HY4, {"swiglu_limit": DROP}).moe.limit == 10.0


ROUTERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"score": "softmax", "groups": 4, "topk_groups": 2, "group_score": "max", "renormalize": False},
    "deepseek_v3": {"score": "sigmoid", "groups": 4, "topk_groups": 2, "group_score": "top2", "epsilon": 1e-20},
    "deepseek_v32": {"score": "sigmoid", "groups": 4, "topk_groups": 2, "epsilon": 1e-20, "correction_bias": True},
    "dots1": {"score": "sigmoid", "correction_bias": True, "epsilon": 1e-20, "scaling": 2.5},
    "ernie4_5_moe": {"score": "softmax", "correction_bias": True, "epsilon": 0.0, "least_sum": 1e-12, "scaling": 1.0},
    "glm4_moe": {"score": "sigmoid", "correction_bias": True, "epsilon": 1e-20, "scaling": 2.5},
    "glm4_moe_lite": {"score": "sigmoid", "correction_bias": True, "epsilon": 1e-20, "scaling": 1.8},
    "glm_moe_dsa": {"score": "sigmoid", "correction_bias": True, "epsilon": 1e-20, "scaling": 2.5},
    "gpt_oss": {"score": "logits", "correction_bias": False, "logit_bias": True, "renormalize": False},
    "hunyuan_v1_moe": {"score": "softmax", "correction_bias": False, "renormalize": True, "epsilon": 0.0},
    "hy_v3": {"score": "sigmoid", "correction_bias": True, "epsilon": 1e-20, "scaling": 2.826},
    "hy_v4": {"score": "sigmoid", "correction_bias": True, "epsilon": 1e-20, "scaling": 2.827, "groups": 1},
    "kimi_k25": {"score": "sigmoid", "correction_bias": True, "epsilon": 1e-20, "groups": 1},
    "minimax_m2": {"score": "sigmoid", "correction_bias": True, "epsilon": 0.0, "scaling": 1.0, "renormalize": True},
    "mixtral": {"score": "softmax", "correction_bias": False, "renormalize": True, "epsilon": 0.0},
    "olmoe": {"score": "softmax", "correction_bias": False, "renormalize": False},
    "qwen3_moe": {"score": "softmax", "correction_bias": False, "renormalize": True, "epsilon": 0.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers(family: str) -> None:
    router = read(family, {}).moe.router
    assert {name: getattr(router, name) for name in ROUTERS[family]} == ROUTERS[family]


@pytest.mark.parametrize(
    "family", [V3, "deepseek_v32", "dots1", GLM, "glm4_moe_lite", DSA, HY4, "kimi_k25", "qwen3_moe"]
)
def test_renormalisation_is_the_files_choice(family: str) -> None:
    assert not read(family, {"norm_topk_prob": False}).moe.router.renormalize


def test_greedy_choice_reads_no_groups() -> None:
    router = read(V2, {"topk_method": "greedy"}).moe.router
    assert (router.groups, router.topk_groups) == (1, 1)
    assert read(V2, {"topk_method": "greedy", "n_group": None, "topk_group": DROP}) == read(
        V2, {"topk_method": "greedy"}
    )


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("gpt_oss", {}, (8, 0, 8, 0)),
        ("gpt_oss", {"layer_types": DROP}, (8, 0, 8, 0)),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4, "sliding_window": None}, ()),
        ("mixtral", {"sliding_window": 4}, (4, 4, 4)),
        ("dots1", {}, ()),
        ("dots1", {"layer_types": DROP}, ()),
        ("dots1", {"layer_types": DROP, "max_window_layers": 1}, (0, 4096, 4096)),
        ("dots1", {"layer_types": DROP, "max_window_layers": 1, "sliding_window": None}, ()),
        ("dots1", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (0, 4096, 0)),
        ("qwen3_moe", {"sliding_window": 4096, "max_window_layers": 1}, ()),
    ],
)
def test_windows(family: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert grouped(read(family, changes)).windows == windows


@pytest.mark.parametrize(
    ("family", "bias", "out_bias", "qk_norm", "sinks"),
    [
        ("dots1", False, False, "before_rope", False),
        ("ernie4_5_moe", False, False, "none", False),
        ("glm4_moe", True, False, "before_rope", False),
        ("gpt_oss", True, True, "none", True),
        ("hunyuan_v1_moe", False, False, "after_rope", False),
        ("hy_v3", False, False, "before_rope", False),
        ("minimax_m2", False, False, "flat", False),
        ("mixtral", False, False, "none", False),
        ("olmoe", False, False, "flat", False),
        ("qwen3_moe", False, False, "before_rope", False),
    ],
)
def test_grouped_query_attention(family: str, bias: bool, out_bias: bool, qk_norm: str, sinks: bool) -> None:
    attention = grouped(read(family, {}))
    assert (attention.bias, attention.out_bias, attention.qk_norm, attention.sinks) == (bias, out_bias, qk_norm, sinks)
    assert (attention.heads, attention.head_dim) == (4, 16)
    assert attention.rope.interleaved == (family == "ernie4_5_moe")
    if family in ("dots1", "hy_v3", "olmoe", "qwen3_moe"):
        both = grouped(read(family, {"attention_bias": True}))
        assert both.bias and both.out_bias


@pytest.mark.parametrize(
    ("family", "expert_ffn", "shared_ffn"),
    [("deepseek_v2", 32, 64), ("dots1", 32, 64), ("ernie4_5_moe", 32, 64), ("gpt_oss", 32, 0), ("mixtral", 96, 0)],
)
def test_expert_widths(family: str, expert_ffn: int, shared_ffn: int) -> None:
    moe = read(family, {}).moe
    assert (moe.expert_ffn, moe.shared_ffn) == (expert_ffn, shared_ffn)


def test_gpt_oss_experts() -> None:
    moe = read("gpt_oss", {}).moe
    assert (moe.activation, moe.expert_bias, moe.limit) == ("gpt_oss", True, 0.5)
    assert read("gpt_oss", {"num_experts_per_tok": DROP, "experts_per_token": 2}) == read("gpt_oss", {})


@pytest.mark.parametrize(("family", "copies"), [(GLM, True), (V3, True), (DSA, False), (HY4, False), ("hy_v3", False)])
def test_multi_token_prediction(family: str, copies: bool) -> None:
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        others = {"num_nextn_predict_layers": DROP, "num_mtp_layers": DROP}
        config = read(family, {**others, key: 2})
        assert (config.mtp_layers, config.mtp_copies) == (2, copies)
        none = read(family, {**others, key: 0})
        assert (none.mtp_layers, none.mtp_copies) == (0, False)


def test_released_words_for_a_type() -> None:
    config = tiny.CONFIGS[V3]
    assert read_config({**config, "model_type": "kimi_k2"}, "k2")[1] == read(V3, {})
    assert read_config({**tiny.CONFIGS[HUNYUAN], "model_type": "hunyuan"}, "a13b")[1] == read(HUNYUAN, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla = True is not supported, only False"),
        ({"num_experts": 1, "moe_topk": 1}, "model_type 'hunyuan' with num_experts = 1 is a dense model"),
    ],
)
def test_other_models_called_hunyuan_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_config({**tiny.CONFIGS[HUNYUAN], "model_type": "hunyuan", **changes}, "config.json")


def test_kimi_settings_lie_in_its_text_part() -> None:
    data = tiny.CONFIGS["kimi_k25"]
    with pytest.raises(ConfigError, match="config.json: missing key text_config"):
        read_config({**data, "text_config": None}, "config.json")
    with pytest.raises(ConfigError, match="config.json: unknown key hidden_size"):
        read_config({**data, "hidden_size": 64}, "config.json")
    with pytest.raises(ConfigError, match="tie_word_embeddings differs from the one in text_config"):
        read_config({**data, "tie_word_embeddings": True}, "config.json")
    with pytest.raises(UnsupportedError, match="text_config: model_type = 'llama' is not supported"):
        read("kimi_k25", {"model_type": "llama"})
    quantised = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert read("kimi_k25", quantised) == read("kimi_k25", {"model_type": "kimi_k2"})


def test_minimax_names_its_rotated_dims() -> None:
    flat = {"rope_parameters": DROP, "rope_theta": 5e6}
    assert grouped(read("minimax_m2", {**flat, "rotary_dim": 8})) == grouped(read("minimax_m2", {}))
    assert grouped(read("minimax_m2", flat)).rope.rotary_dim == 16


def test_ernie_ties_its_head_unless_told_otherwise() -> None:
    assert read("ernie4_5_moe", {"tie_word_embeddings": DROP}).tied_head
    assert not read("ernie4_5_moe", {"tie_word_embeddings": False}).tied_head
    assert not read("qwen3_moe", {"tie_word_embeddings": DROP}).tied_head


def grouped(config: DecoderConfig) -> AttentionConfig:
    assert isinstance(config.attention, AttentionConfig)
    return config.attention


def latent(config: DecoderConfig) -> LatentAttentionConfig:
    assert isinstance(config.attention, LatentAttentionConfig)
    return config.attention
