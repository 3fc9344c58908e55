"""The native quantised format: what `quantization_config` in config.json says.

    "quantization_config": {
        "quant_method": "jaxmoe", "version": 1, "kv_cache": "int8",
        "tensors": {"model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": "w8a8-g128", ...}
    }

Each named tensor is INT8 [out, in] under its hub name, with float32 scales [out, ceil(in / group)] under the name plus
"_scale". Tensors that are not named are float.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from jaxmoe.decode import decode
from jaxmoe.errors import ConfigError, RecipeError, UnsupportedError
from jaxmoe.models.leaves import Schemes
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.quant.scheme import Scheme, parse_scheme

VERSION: Final = 1
FLOAT_ROLES: Final = frozenset({"norm", "router", "router.bias", "attention.bias", "attention.norm", "embed", "head"})
"""Roles without a quantised operator (vectors, the embedding, the head) or that routing depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """The object under `quantization_config`."""

    quant_method: Literal["jaxmoe"]
    version: int
    tensors: Mapping[str, str]
    """Hub tensor template -> scheme name."""
    kv_cache: Literal["int8", "float32", "bfloat16"] = "int8"
    """Storage of keys and values that the checkpoint was gated with."""


def read_quantization(config: Mapping[str, Any], where: str) -> QuantizationConfig | None:
    """The quantisation of a checkpoint, None for a float one.

    Raises:
        UnsupportedError: another method or a version from the future.
        ConfigError: unknown or missing keys.
    """
    data = config.get("quantization_config")
    if data is None:
        return None
    method = data.get("quant_method") if isinstance(data, Mapping) else None
    if method != "jaxmoe":
        raise UnsupportedError(
            f"{where}: quantisation method {method!r} is not supported by this version, only 'jaxmoe'"
        )
    # Before the rest: another version may have other keys.
    version = data.get("version", VERSION)
    if version != VERSION:
        raise UnsupportedError(f"{where}: quantization_config version {version}, this version reads {VERSION}")
    return decode(QuantizationConfig, data, where=f"{where}: quantization_config")


def schemes_of(quantization: QuantizationConfig | None, manifest: Manifest, where: str) -> dict[str, Scheme | None]:
    """Parameter path -> scheme.

    Raises:
        ConfigError: a named tensor does not exist in the model or always stays float, or a scheme name is wrong.
    """
    if quantization is None:
        return {}
    by_hub: dict[str, list[Entry]] = {}
    for entry in manifest.entries:
        by_hub.setdefault(entry.hub, []).append(entry)
    unknown = sorted(set(quantization.tensors) - set(by_hub))
    if unknown:
        raise ConfigError(
            f"{where}: quantization_config names tensors that the model does not have: {', '.join(unknown)}"
        )
    schemes: dict[str, Scheme | None] = {}
    for hub, name in quantization.tensors.items():
        try:
            scheme = parse_scheme(name)
        except RecipeError as error:
            raise ConfigError(f"{where}: quantization_config, {hub}: {error}") from error
        for entry in by_hub[hub]:
            if entry.role in FLOAT_ROLES:
                raise ConfigError(f"{where}: quantization_config, {hub}: {entry.role} always stays float")
            schemes[entry.path] = scheme
    return schemes


def describe(schemes: Schemes, manifest: Manifest, kv_cache: str) -> dict[str, Any]:
    """The `quantization_config` object of schemes; `read_quantization` and `schemes_of` invert it."""
    tensors = {}
    for entry in manifest.entries:
        scheme = schemes.get(entry.path)
        if scheme is not None:
            tensors[entry.hub] = scheme.name
    return {
        "quant_method": "jaxmoe",
        "version": VERSION,
        "kv_cache": kv_cache,
        "tensors": dict(sorted(tensors.items())),
    }
