"""The table of families, and reading a config.json through it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    hunyuan_v1_moe,
    hy_v3,
    hy_v4,
    kimi_k25,
    minimax_m2,
    mixtral,
    olmoe,
    qwen3_moe,
)
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.nn.config import AttentionConfig, DecoderConfig, LatentAttentionConfig, RouterConfig

FAMILIES: dict[str, Family] = {
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "deepseek_v32": deepseek_v32.FAMILY,
    "dots1": dots1.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "hunyuan_v1_moe": hunyuan_v1_moe.FAMILY,
    "hy_v3": hy_v3.FAMILY,
    "hy_v4": hy_v4.FAMILY,
    "kimi_k25": kimi_k25.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}

ALIASES = {"hunyuan": "hunyuan_v1_moe", "kimi_k2": "deepseek_v3"}
"""Other words for a `model_type`, which released files use."""


def read_config(data: Mapping[str, Any], where: str) -> tuple[Family, DecoderConfig]:
    """The family and the decoder that a config.json describes.

    Raises:
        ConfigError: no model_type, an unknown or missing key, or numbers that contradict each other.
        UnsupportedError: the model_type or an option is not supported; the supported ones are listed.
    """
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{where}: no model_type")
    model_type = ALIASES.get(model_type, model_type)
    if model_type not in FAMILIES:
        known = ", ".join([*FAMILIES, *ALIASES])
        raise UnsupportedError(f"{where}: model_type {model_type!r} is not supported; supported: {known}")
    family = FAMILIES[model_type]
    reader = ConfigReader(data, where)
    config = family.read_config(reader)
    reader.finish()
    _check(config, where)
    return family, config


def read_config_file(folder: Path) -> tuple[Family, DecoderConfig]:
    """`read_config` of a checkpoint folder.

    Raises:
        ConfigError: the folder or its config.json is absent or wrong.
        UnsupportedError: see `read_config`.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint (with config.json)")
    return read_config(read_json(folder / "config.json"), str(folder / "config.json"))


def _check(config: DecoderConfig, where: str) -> None:
    if isinstance(config.attention, AttentionConfig):
        _check_attention(config.attention, where)
    else:
        _check_latent(config.attention, where)
    _check_router(config.moe.router, where)
    if config.moe_layers < 1:
        raise UnsupportedError(f"{where}: {config.dense_layers} of {config.layers} layers are dense; no experts left")


def _check_attention(attention: AttentionConfig, where: str) -> None:
    if attention.heads % attention.kv_heads:
        raise ConfigError(f"{where}: {attention.heads} heads are no multiple of {attention.kv_heads} key-value heads")


def _check_latent(attention: LatentAttentionConfig, where: str) -> None:
    indexer = attention.indexer
    if indexer is None:
        return
    if not attention.q_lora:
        raise UnsupportedError(f"{where}: q_lora_rank is null, but the indexer reads the query latent")
    if indexer.head_dim < attention.rope_dim:
        raise ConfigError(
            f"{where}: index_head_dim {indexer.head_dim} is below the {attention.rope_dim} dims that rotate"
        )


def _check_router(router: RouterConfig, where: str) -> None:
    if router.top_k > router.experts:
        raise ConfigError(f"{where}: top-{router.top_k} of {router.experts} experts")
    if router.experts % router.groups or router.topk_groups > router.groups:
        raise ConfigError(f"{where}: {router.experts} experts in {router.groups} groups, of which {router.topk_groups}")
    if router.group_score == "top2" and router.experts == router.groups > 1:
        raise ConfigError(f"{where}: {router.groups} groups of one expert; a group is ranked by its two best experts")
    if router.groups > 1 and router.topk_groups * (router.experts // router.groups) < router.top_k:
        raise ConfigError(f"{where}: {router.topk_groups} groups hold fewer than {router.top_k} experts")
