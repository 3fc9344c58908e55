"""The grammar of msModelSlim's YAML (`apiversion: modelslim_v1`), decoded strictly.

Source: MindStudio-ModelSlim, lab_practice/*/*.yaml and the processors' configuration classes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from jaxmoe.decode import decode
from jaxmoe.errors import ConfigError, UnsupportedError

VERSION: Final = "modelslim_v1"
_WITH_IMAGES: Final = "multimodal_vlm_modelslim_v1"
_OTHER_VERSIONS: Final = {
    "modelslim_v0": "the old grammar; write its anti_cfg and calib_cfg as processors of modelslim_v1",
    "modelslim_convert": "a conversion between formats, not a recipe",
    "multimodal_sd_modelslim_v1": "it is for image and video generators",
}
_EXPONENT: Final = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+\Z")
"""Numbers such as 1e-5, which YAML 1.1 reads as text and msModelSlim as numbers."""

Subgraph = Literal["norm-linear", "linear-linear", "ov", "up-down"]
_SUBGRAPHS: Final[tuple[Subgraph, ...]] = ("norm-linear", "linear-linear", "ov", "up-down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """How one tensor is quantised."""

    dtype: Literal["float", "int8", "int4", "mxfp8", "mxfp4", "fp8_e4m3"]
    scope: Literal[
        "per_tensor", "per_channel", "per_group", "per_block", "per_token", "pd_mix", "per_head", "dual_scale"
    ] = "per_tensor"
    symmetric: bool = True
    method: str = "minmax"
    ext: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Activations and weights of linear layers."""

    act: Quantizer | None = None
    weight: Quantizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearQuant:
    """linear_quant: rounds weights."""

    type: str
    qconfig: LinearConfig
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuaRot:
    """quarot: rotates the residual stream."""

    type: str
    online: bool = False
    block_size: int = -1
    max_tp_size: int = 4
    down_proj_online_layers: tuple[int, ...] = ()
    export_extra_info: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothQuant:
    """smooth_quant: smoothing between norms and what reads them."""

    type: str
    alpha: float = 0.5
    symmetric: bool = True
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IterSmooth:
    """iter_smooth: smoothing between norms, values, up projections and what reads them."""

    type: str
    alpha: float = 0.9
    scale_min: float | None = None
    symmetric: bool = True
    enable_subgraph_type: tuple[Subgraph, ...] = _SUBGRAPHS
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexSmooth:
    """flex_smooth_quant and flex_awq_ssz: smoothing with a search for alpha and beta."""

    type: str
    alpha: float | None = None
    beta: float | None = None
    qconfig: LinearConfig | None = None
    enable_subgraph_type: tuple[Subgraph, ...] = _SUBGRAPHS
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """awq: smoothing by mean magnitudes with a search."""

    type: str
    weight_qconfig: Quantizer
    n_grid: int = 20
    enable_subgraph_type: tuple[Subgraph, ...] = _SUBGRAPHS
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheQuant:
    """dynamic_cache and fa3_quant: keys and values."""

    type: str
    qconfig: Quantizer | None = None
    details: Mapping[str, Quantizer] | None = None
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSmooth:
    """kv_smooth: moves difficulty from keys to queries."""

    type: str
    smooth_factor: float = 1.0
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """load and saver, which say when a layer is read and written."""

    type: str


Smoothing = SmoothQuant | IterSmooth | FlexSmooth | Awq
Step = LinearQuant | QuaRot | Smoothing | CacheQuant | CacheSmooth | Moving

_STEPS: Final[dict[str, type]] = {
    "linear_quant": LinearQuant,
    "quarot": QuaRot,
    "iter_smooth": IterSmooth,
    "smooth_quant": SmoothQuant,
    "flex_smooth_quant": FlexSmooth,
    "flex_awq_ssz": FlexSmooth,
    "awq": Awq,
    "dynamic_cache": CacheQuant,
    "fa3_quant": CacheQuant,
    "kv_smooth": CacheSmooth,
    "load": Moving,
    "saver": Moving,
}
_MISSING_STEPS: Final = {
    "adapt_rotation": "a learned rotation does not exist here; use quarot",
    "online_quarot": "rotations while serving do not exist here; use quarot",
    "autoround_quant": "it is a rounding method here; use a recipe of ours with rounding = 'learned'",
    "trainable_linear_quant": "it is a rounding method here; use a recipe of ours with rounding = 'learned'",
    "flatquant": "learned affine maps do not exist here; use quarot and flex_smooth_quant",
    "oasq": "it does not exist here; use flex_smooth_quant",
    "svd_res": "low-rank residuals do not exist here; leave the layers out of linear_quant instead",
    "float_sparse": "sparse weights do not exist here",
    "unary_analysis": "an analysis is no part of a recipe",
    "binary_analysis": "an analysis is no part of a recipe",
    "binary_analysis_layer_wise": "an analysis is no part of a recipe",
    "binary_analysis_model_wise": "an analysis is no part of a recipe",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What the file says it makes."""

    w_bit: int | None = None
    a_bit: int | None = None
    is_sparse: bool = False
    kv_cache: bool = False
    fa_bit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Who the file is for; nothing of it changes the result."""

    config_id: str | None = None
    score: float | None = None
    label: Label | None = None
    verified_model_types: Any = None
    verified_tags: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """An output format."""

    type: str
    part_file_size: int = 4
    ext: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    type: str
    configs: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prior:
    process: tuple[Any, ...]
    dataset: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    process: tuple[Any, ...]
    runner: Literal["auto", "model_wise", "layer_wise", "dp_layer_wise"] = "auto"
    prior: tuple[_Prior, ...] = ()
    dataset: str | None = None
    save: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A whole file."""

    version: str
    metadata: Metadata
    runner: str
    steps: tuple[tuple[str, Step], ...]
    """(what to call it in messages, step) in order; prior stages first, groups opened."""
    datasets: tuple[str, ...]
    save: tuple[Save, ...]
    prior: bool
    """Whether there are prior stages."""
    unused: tuple[str, ...]
    """Top-level keys that no step refers to."""


def read_file(path: Path) -> File:
    """The file, every field known and of the right type.

    Raises:
        ConfigError: it is absent, is no YAML, gives a key twice, or has an unknown or missing key.
        UnsupportedError: another apiversion, or a processor that does not exist here.
    """
    data = _read_yaml(path)
    version = data.get("apiversion")
    if version not in (VERSION, _WITH_IMAGES):
        reason = _OTHER_VERSIONS.get(version) if isinstance(version, str) else None
        raise UnsupportedError(f"{path}: apiversion {version!r} is not {VERSION!r}" + (f": {reason}" if reason else ""))
    if "spec" not in data:
        raise ConfigError(f"{path}: missing key spec")
    spec = decode(_Spec, _plain(data["spec"]), where=f"{path}: spec")
    used = set(_container_ids(data["spec"]))
    others = [key for key in data if key not in ("apiversion", "metadata", "spec")]
    steps: list[tuple[str, Step]] = []
    for index, prior in enumerate(spec.prior):
        steps += _steps(prior.process, f"{path}: prior {index + 1}, step ", f"prior {index + 1}, step ")
    steps += _steps(spec.process, f"{path}: step ", "step ")
    datasets = (*(prior.dataset for prior in spec.prior), spec.dataset)
    return File(
        version=version,
        metadata=decode(Metadata, _plain(data.get("metadata") or {}), where=f"{path}: metadata"),
        runner=spec.runner,
        steps=tuple(steps),
        datasets=tuple(dict.fromkeys(name for name in datasets if name is not None)),
        save=spec.save,
        prior=bool(spec.prior),
        unused=tuple(key for key in others if used.isdisjoint(_container_ids(data[key]))),
    )


def _steps(process: tuple[Any, ...], where: str, label: str) -> Iterator[tuple[str, Step]]:
    for index, step in enumerate(process):
        kind = step.get("type") if isinstance(step, Mapping) else None
        here, short = f"{where}{index + 1}", f"{label}{index + 1}"
        if not isinstance(step, Mapping) or not isinstance(kind, str):
            raise ConfigError(f"{here}: {step!r} has no type; known types: group, {', '.join(_STEPS)}")
        if kind == "group":
            yield from _steps(decode(_Group, step, where=f"{here} (group)").configs, f"{here}.", f"{short}.")
            continue
        if kind in _MISSING_STEPS:
            raise UnsupportedError(f"{here}: processor {kind} is not supported: {_MISSING_STEPS[kind]}")
        if kind not in _STEPS:
            raise ConfigError(f"{here}: unknown processor {kind!r}; known: group, {', '.join(_STEPS)}")
        yield f"{short} ({kind})", decode(_STEPS[kind], step, where=f"{here} ({kind})")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable: {error}") from error
    try:
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), str(path), ())
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__} where a table was expected")
    return data


def _check_keys(node: Any, where: str, above: tuple[int, ...]) -> None:
    """Refuses keys that are given twice, of which YAML would keep the last, and anchors inside themselves."""
    if node is None or isinstance(node.value, str):
        return
    if id(node) in above:
        raise ConfigError(f"{where}: line {node.start_mark.line + 1}: an anchor refers to itself")
    above = (*above, id(node))
    seen: set[str] = set()
    for item in node.value:
        key, value = item if isinstance(item, tuple) else (None, item)
        if key is not None and isinstance(key.value, str):
            if key.value in seen:
                raise ConfigError(f"{where}: line {key.start_mark.line + 1}: key {key.value} is given twice")
            seen.add(key.value)
        _check_keys(value, where, above)


def _plain(value: Any) -> Any:
    """The data with numbers such as 1e-5 as numbers."""
    if isinstance(value, str) and _EXPONENT.match(value):
        return float(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def _container_ids(value: Any) -> Iterator[int]:
    """Identities of all tables and lists inside: an alias is the very object of its anchor."""
    if isinstance(value, dict | list):
        yield id(value)
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _container_ids(entry)
