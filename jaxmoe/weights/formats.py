"""What `quantization_config` in config.json says: our own format, and that of others (weights.foreign).

Our own:

    "quantization_config": {
        "quant_method": "jaxmoe", "version": 1, "kv_cache": "int8",
        "tensors": {"model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": "w8a8-g128", ...}
    }

Each named tensor is INT8 [out, in] under its own name, or 4-bit pairs [out, in / 2] (see `quant.int4`) under the name
plus "_packed", with float32 scales [out, ceil(in / group)] under the name plus "_scale". Tensors that are not named are
float. A name stands for all layers that have it, dense, expert and multi-token-prediction layers alike: they have one
scheme.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from jaxmoe.decode import decode
from jaxmoe.errors import ConfigError, RecipeError, UnsupportedError
from jaxmoe.models.leaves import Schemes
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.ops.pages import KVDtype
from jaxmoe.quant.scheme import Scheme, parse_scheme
from jaxmoe.weights.foreign import METHODS, ForeignFormat

VERSION: Final = 1
OWN: Final = "jaxmoe"
FLOAT_ROLES: Final = frozenset(
    {
        "attention.bias",
        "attention.kv_b",
        "attention.norm",
        "attention.sinks",
        "embed",
        "experts.bias",
        "head",
        "hyper",
        "indexer.norm",
        "indexer.weights",
        "mtp.projection",
        "norm",
        "router",
        "router.bias",
    }
)
"""Roles without a quantised operator: vectors, the embedding, the head, what routing and indexing depend on, and
attention.kv_b, which absorbed attention uses transposed, half by half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """The object under `quantization_config` of our own checkpoints."""

    quant_method: Literal["jaxmoe"]
    version: int
    tensors: Mapping[str, str]
    """Own tensor template -> scheme name."""
    kv_cache: KVDtype = "int8"
    """Storage of keys and values that the checkpoint was gated with."""


Quantization = QuantizationConfig | ForeignFormat | None
"""The format of a checkpoint; None: all its tensors are plain floats."""


def method_name(quantization: Quantization) -> str:
    """What a format calls itself; 'float' for plain floats."""
    if quantization is None:
        return "float"
    return quantization.method if isinstance(quantization, ForeignFormat) else quantization.quant_method


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization:
    """The quantisation that a config.json names, at its top or in its text_config.

    Raises:
        UnsupportedError: another method, a version from the future, or an option that this version cannot read.
        ConfigError: unknown, missing or contradicting keys.
    """
    data = _quantization_config(config, where)
    if data is None:
        return None
    where = f"{where}: quantization_config"
    method = data.get("quant_method") if isinstance(data, Mapping) else None
    if isinstance(method, str) and method in METHODS:
        return METHODS[method](data, where)
    if method != OWN:
        known = ", ".join(map(repr, (OWN, *METHODS)))
        raise UnsupportedError(f"{where}: quantisation method {method!r} is not supported; supported: {known}")
    # Before the rest: another version may have other keys.
    version = data.get("version", VERSION)
    if version != VERSION:
        raise UnsupportedError(f"{where} version {version}, this version reads {VERSION}")
    return decode(QuantizationConfig, data, where=where)


def schemes_of(quantization: Quantization, manifest: Manifest, where: str) -> dict[str, Scheme | None]:
    """Parameter path -> scheme, as far as config.json alone decides it.

    Args:
        quantization: what config.json says.
        manifest: the model.
        where: config.json, for messages.

    Raises:
        ConfigError: a named tensor does not exist in the model or always stays float, or a scheme name is wrong.
        UnsupportedError: the format keeps integers and its tensors decide which parameters have them.
    """
    if isinstance(quantization, ForeignFormat):
        if quantization.keeps_integers:
            raise UnsupportedError(
                f"{where}: with quant_method {quantization.method!r} the tensors decide what is INT8; give the folder "
                "of the checkpoint with its weights, or a recipe"
            )
        return {}
    if quantization is None:
        return {}
    by_own: dict[str, list[Entry]] = {}
    for entry in manifest.entries:
        by_own.setdefault(entry.own, []).append(entry)
    unknown = sorted(set(quantization.tensors) - set(by_own))
    if unknown:
        raise ConfigError(
            f"{where}: quantization_config names tensors that the model does not have: {', '.join(unknown)}"
        )
    schemes: dict[str, Scheme | None] = {}
    for template, name in quantization.tensors.items():
        try:
            scheme = parse_scheme(name)
        except RecipeError as error:
            raise ConfigError(f"{where}: quantization_config, {template}: {error}") from error
        for entry in by_own[template]:
            if entry.role in FLOAT_ROLES:
                raise ConfigError(f"{where}: quantization_config, {template}: {entry.role} always stays float")
            schemes[entry.path] = scheme
    return schemes


def describe(schemes: Schemes, manifest: Manifest, kv_cache: str) -> dict[str, Any]:
    """The `quantization_config` object of schemes; `read_quantization` and `schemes_of` invert it.

    Args:
        schemes: by path; parameters that share an own name have the same one, or all none.
        manifest: the model.
        kv_cache: storage of keys and values.
    """
    by_own: dict[str, Scheme | None] = {}
    for entry in manifest.entries:
        scheme = schemes.get(entry.path)
        assert by_own.setdefault(entry.own, scheme) == scheme, (entry.own, by_own[entry.own], scheme)
    tensors = {own: scheme.name for own, scheme in sorted(by_own.items()) if scheme is not None}
    return {"quant_method": OWN, "version": VERSION, "kv_cache": kv_cache, "tensors": tensors}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that names no quantisation."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    text = plain.get("text_config")
    if isinstance(text, Mapping):
        plain["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return plain


def _quantization_config(config: Mapping[str, Any], where: str) -> Any:
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    outer = config.get("quantization_config")
    if outer is not None and inner is not None and outer != inner:
        raise ConfigError(f"{where}: quantization_config and text_config.quantization_config contradict each other")
    return inner if outer is None else outer
