"""Released models: their config.json files in configs/models read as what they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxmoe.assets import asset
from jaxmoe.models.registry import ALIASES, FAMILIES, read_config
from jaxmoe.nn.config import AttentionConfig, DecoderConfig, LatentAttentionConfig, MoEConfig
from tests import tiny

PRESETS = sorted(path.stem for path in asset("configs", "models").glob("*.json"))
RELEASED = [name for name in PRESETS if not name.endswith("_tiny")]
README = asset("configs", "models", "README.md").read_text(encoding="utf-8")


def preset(name: str) -> dict[str, Any]:
    return json.loads(asset("configs", "models", f"{name}.json").read_text(encoding="utf-8"))


def config_of(name: str) -> DecoderConfig:
    return read_config(preset(name), name)[1]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads(name: str) -> None:
    family, config = read_config(preset(name), name)
    model_type = preset(name)["model_type"]
    assert family.name == config.family == ALIASES.get(model_type, model_type)


@pytest.mark.parametrize("name", RELEASED)
def test_every_release_has_a_line_with_its_source(name: str) -> None:
    assert README.count(f"`{name}.json`") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tiny_preset(family: str) -> None:
    assert preset(f"{family}_tiny") == json.loads(json.dumps(tiny.CONFIGS[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_release(family: str) -> None:
    assert any(config_of(name).family == family for name in RELEASED)


# Sizes: layers, dense layers, width, dense width; experts, chosen, their width, the shared one's; vocabulary.
SIZES: dict[str, tuple[int, ...]] = {
    "deepseek-v2-lite": (27, 1, 2048, 10944, 64, 6, 1408, 2816, 102400),
    "deepseek-v2.5": (60, 1, 5120, 12288, 160, 6, 1536, 3072, 102400),
    "deepseek-v3": (61, 3, 7168, 18432, 256, 8, 2048, 2048, 129280),
    "deepseek-v3.2": (61, 3, 7168, 18432, 256, 8, 2048, 2048, 129280),
    "dots-llm1": (62, 1, 4096, 10944, 128, 6, 1408, 2816, 152064),
    "ernie-4.5-21b-a3b": (28, 1, 2560, 12288, 64, 6, 1536, 3072, 103424),
    "glm-4.5": (92, 3, 5120, 12288, 160, 8, 1536, 1536, 151552),
    "glm-4.5-air": (46, 1, 4096, 10944, 128, 8, 1408, 1408, 151552),
    "glm-4.7-flash": (47, 1, 2048, 10240, 64, 4, 1536, 1536, 154880),
    "glm-5": (78, 3, 6144, 12288, 256, 8, 2048, 2048, 154880),
    "glm-5.2": (78, 3, 6144, 12288, 256, 8, 2048, 2048, 154880),
    "gpt-oss-120b": (36, 0, 2880, 0, 128, 4, 2880, 0, 201088),
    "gpt-oss-20b": (24, 0, 2880, 0, 32, 4, 2880, 0, 201088),
    "hunyuan-a13b": (32, 0, 4096, 0, 64, 8, 3072, 3072, 128167),
    "hy3-preview": (80, 1, 4096, 13312, 192, 8, 1536, 1536, 120832),
    "hy4-preview": (78, 1, 6144, 18432, 256, 8, 2048, 2048, 120832),
    "kimi-k2": (61, 1, 7168, 18432, 384, 8, 2048, 2048, 163840),
    "kimi-k2.5": (61, 1, 7168, 18432, 384, 8, 2048, 2048, 163840),
    "minimax-m2": (62, 0, 3072, 0, 256, 8, 1536, 0, 200064),
    "mixtral-8x7b": (32, 0, 4096, 0, 8, 2, 14336, 0, 32000),
    "olmoe-1b-7b": (16, 0, 2048, 0, 64, 8, 1024, 0, 50304),
    "qwen3-235b-a22b": (94, 0, 4096, 0, 128, 8, 1536, 0, 151936),
    "qwen3-30b-a3b": (48, 0, 2048, 0, 128, 8, 768, 0, 151936),
}
# Query heads, key-value heads, dims of a head, rotated ones, base.
GROUPED: dict[str, tuple[Any, ...]] = {
    "dots-llm1": (32, 32, 128, 128, 1e7),
    "ernie-4.5-21b-a3b": (20, 4, 128, 128, 5e5),
    "glm-4.5": (96, 8, 128, 64, 1e6),
    "glm-4.5-air": (96, 8, 128, 64, 1e6),
    "gpt-oss-120b": (64, 8, 64, 64, 150000),
    "gpt-oss-20b": (64, 8, 64, 64, 150000),
    # The base that llama.cpp computes for the same model (freq_base_train of its converter).
    "hunyuan-a13b": (32, 8, 128, 128, pytest.approx(11158839.9251, rel=1e-10)),
    "hy3-preview": (64, 8, 128, 128, 11158840),
    "minimax-m2": (48, 8, 128, 64, 5e6),
    "mixtral-8x7b": (32, 8, 128, 128, 1e6),
    "olmoe-1b-7b": (16, 16, 128, 128, 1e4),
    "qwen3-235b-a22b": (64, 4, 128, 128, 1e6),
    "qwen3-30b-a3b": (32, 4, 128, 128, 1e6),
}
# Heads; latents of queries and of keys; dims without and with rotation, of values; base; epsilon.
LATENT: dict[str, tuple[float, ...]] = {
    "deepseek-v2-lite": (16, 0, 512, 128, 64, 128, 1e4, 1e-6),
    "deepseek-v2.5": (128, 1536, 512, 128, 64, 128, 1e4, 1e-6),
    "deepseek-v3": (128, 1536, 512, 128, 64, 128, 1e4, 1e-6),
    "deepseek-v3.2": (128, 1536, 512, 128, 64, 128, 1e4, 1e-6),
    "glm-4.7-flash": (20, 768, 512, 192, 64, 256, 1e6, 1e-5),
    "glm-5": (64, 2048, 512, 192, 64, 256, 1e6, 1e-5),
    "glm-5.2": (64, 2048, 512, 192, 64, 256, 8e6, 1e-5),
    "hy4-preview": (64, 2048, 512, 192, 64, 256, 1e7, 1e-5),
    "kimi-k2": (64, 1536, 512, 128, 64, 128, 5e4, 1e-6),
    "kimi-k2.5": (64, 1536, 512, 128, 64, 128, 5e4, 1e-5),
}


def test_the_tables_are_whole() -> None:
    assert sorted(SIZES) == RELEASED == sorted([*GROUPED, *LATENT])


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    config = config_of(name)
    moe: MoEConfig = config.moe
    experts = (moe.router.experts, moe.router.top_k, moe.expert_ffn, moe.shared_ffn)
    assert (config.layers, config.dense_layers, config.embed, config.ffn, *experts, config.vocab) == SIZES[name]
    assert config.tied_head == (name in ("ernie-4.5-21b-a3b", "hunyuan-a13b"))


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_query_attention(name: str) -> None:
    attention = config_of(name).attention
    assert isinstance(attention, AttentionConfig)
    sizes = (attention.heads, attention.kv_heads, attention.head_dim, attention.rope.rotary_dim, attention.rope.theta)
    assert sizes == GROUPED[name]


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name: str) -> None:
    attention = config_of(name).attention
    assert isinstance(attention, LatentAttentionConfig)
    dims = (attention.nope_dim, attention.rope_dim, attention.v_dim)
    found = (attention.heads, attention.q_lora, attention.kv_lora, *dims, attention.rope.theta, attention.norm_eps)
    assert found == LATENT[name]
    assert attention.rope.interleaved and attention.rope.rotary_dim == 64


@pytest.mark.parametrize(
    ("name", "factor", "beta_fast", "correction"),
    [
        # 1.59 and 1.87: what onnxruntime/mobius#548 (case 72) names for the two models.
        ("deepseek-v2-lite", 40.0, 32.0, 1.5896),
        ("deepseek-v2.5", 40.0, 32.0, 1.8739),
        ("deepseek-v3", 40.0, 32.0, 1.8739),
        ("kimi-k2", 32.0, 1.0, 1.8133),
        ("kimi-k2.5", 64.0, 32.0, 2.0047),
    ],
)
def test_yarn(name: str, factor: float, beta_fast: float, correction: float) -> None:
    attention = config_of(name).attention
    assert isinstance(attention, LatentAttentionConfig) and attention.rope.yarn
    assert (attention.rope.yarn.factor, attention.rope.yarn.beta_fast) == (factor, beta_fast)
    assert (attention.rope.yarn.attention_factor, attention.rope.yarn.original_positions) == (1.0, 4096)
    assert attention.scale == pytest.approx(192**-0.5 * correction, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "heads", "full"),
    [
        ("deepseek-v3.2", 64, tuple(range(61))),
        ("glm-5", 32, tuple(range(78))),
        ("glm-5.2", 32, (0, 1, 2, *range(6, 78, 4))),
        ("hy4-preview", 32, (0, 1, *range(5, 78, 4))),
    ],
)
def test_indexers(name: str, heads: int, full: tuple[int, ...]) -> None:
    attention = config_of(name).attention
    assert isinstance(attention, LatentAttentionConfig) and attention.indexer
    indexer = attention.indexer
    assert (indexer.heads, indexer.head_dim, indexer.top_k, indexer.full_layers) == (heads, 128, 2048, full)


def test_glm_5_2_schedule_follows_from_its_period() -> None:
    data = preset("glm-5.2")
    without = {key: value for key, value in data.items() if key != "indexer_types"}
    assert data["indexer_types"].count("full") == 21
    assert read_config(without, "without") == read_config(data, "with")


@pytest.mark.parametrize(
    ("name", "scaling", "groups", "topk_groups"),
    [
        ("deepseek-v2.5", 16.0, 8, 3),
        ("deepseek-v3", 2.5, 8, 4),
        ("glm-4.7-flash", 1.8, 1, 1),
        ("glm-5", 2.5, 1, 1),
        ("hy3-preview", 2.826, 1, 1),
        ("hy4-preview", 2.827, 1, 1),
        ("kimi-k2", 2.827, 1, 1),
    ],
)
def test_routers(name: str, scaling: float, groups: int, topk_groups: int) -> None:
    router = config_of(name).moe.router
    assert (router.scaling, router.groups, router.topk_groups) == (scaling, groups, topk_groups)


def test_hy4_preview_is_not_what_its_class_defaults_to() -> None:
    config = config_of("hy4-preview")
    assert config.hyper and (config.hyper.streams, config.hyper.magnitude, config.hyper.epsilon) == (4, 2.0, 1e-6)
    assert (config.moe.limit, config.mtp_layers, config.mtp_copies) == (10.0, 1, False)
    assert config.max_positions == 1048576
    attention = config.attention
    assert isinstance(attention, LatentAttentionConfig) and attention.gate and attention.sinks
    assert attention.scale == 256**-0.5


def test_gpt_oss() -> None:
    config = config_of("gpt-oss-120b")
    assert isinstance(config.attention, AttentionConfig) and config.attention.rope.yarn
    assert config.attention.windows == (128, 0) * 18
    assert (config.attention.rope.yarn.factor, config.attention.rope.yarn.truncate) == (32.0, False)
    assert config.moe.limit == 7.0


def test_glm_4_5_and_air_differ_in_their_norms() -> None:
    large, air = config_of("glm-4.5"), config_of("glm-4.5-air")
    assert isinstance(large.attention, AttentionConfig) and isinstance(air.attention, AttentionConfig)
    assert large.attention.bias and air.attention.bias
    assert (large.attention.qk_norm, air.attention.qk_norm) == ("before_rope", "none")
    assert (large.moe.router.scaling, air.moe.router.scaling) == (2.5, 1.0)
    assert large.mtp_layers == air.mtp_layers == 1


def test_hunyuan_a13b_as_released() -> None:
    """Lists with an entry a layer, attention_head_dim, and an alpha beside leftovers of yarn."""
    data = preset("hunyuan-a13b")
    assert data["moe_topk"] == [8] * 32 and data["moe_intermediate_size"] == [3072] * 32 and "head_dim" not in data
    config = config_of("hunyuan-a13b")
    assert isinstance(config.attention, AttentionConfig)
    assert (config.attention.qk_norm, config.moe.router.score) == ("after_rope", "softmax")


# transformers does not know the word that Kimi-K2 uses for its type.
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "kimi-k2"])
def test_what_transformers_saves_again_reads_the_same(name: str, tmp_path: Path) -> None:
    """transformers moves rope settings, fills defaults in and writes nulls."""
    from transformers import AutoConfig

    data = preset(name)
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert set(again) != set(data)
    assert read_config(again, "again")[1] == read_config(data, "first")[1]
