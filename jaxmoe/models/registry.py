"""The table of families, and reading a config.json through it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models import glm4_moe, hunyuan_v1_moe
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.nn.config import DecoderConfig

FAMILIES: dict[str, Family] = {
    "glm4_moe": glm4_moe.FAMILY,
    "hunyuan_v1_moe": hunyuan_v1_moe.FAMILY,
}


def read_config(data: Mapping[str, Any], where: str) -> tuple[Family, DecoderConfig]:
    """The family and the decoder that a config.json describes.

    Raises:
        ConfigError: no model_type, an unknown or missing key, or numbers that contradict each other.
        UnsupportedError: the model_type or an option is not supported; the supported ones are listed.
    """
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{where}: no model_type")
    if model_type not in FAMILIES:
        raise UnsupportedError(f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
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
    attention, router = config.attention, config.moe.router
    if attention.heads % attention.kv_heads:
        raise ConfigError(f"{where}: {attention.heads} heads are no multiple of {attention.kv_heads} key-value heads")
    if router.top_k > router.experts:
        raise ConfigError(f"{where}: top-{router.top_k} of {router.experts} experts")
    if router.experts % router.groups or router.topk_groups > router.groups:
        raise ConfigError(f"{where}: {router.experts} experts in {router.groups} groups, of which {router.topk_groups}")
    if router.groups > 1 and router.experts == router.groups:
        raise ConfigError(f"{where}: {router.groups} groups of one expert; a group is ranked by its two best experts")
    if router.groups > 1 and router.topk_groups * (router.experts // router.groups) < router.top_k:
        raise ConfigError(f"{where}: {router.topk_groups} groups hold fewer than {router.top_k} experts")
    if config.moe_layers < 1:
        raise UnsupportedError(f"{where}: {config.dense_layers} of {config.layers} layers are dense; no experts left")
