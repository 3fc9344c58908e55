"""Quantised checkpoints of other tools: what their configuration says, as encodings that tensors may use.

Keys that change what the stored numbers mean are checked, keys that do not are listed, all others are refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from jaxmoe.decode import decode, read_json
from jaxmoe.errors import ConfigError, RecipeError, UnsupportedError
from jaxmoe.models.leaves import scale_name
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.decoded import Fp8Blocks, Fp8Scales, Int4Groups, MxFp4, MxFp8
from jaxmoe.weights.encodings import (
    FLOAT_DTYPES,
    Encoding,
    Integers,
    Plain,
    Tensors,
)

ASCEND_FILE: Final = "quant_model_description.json"
MODELOPT_FILE: Final = "hf_quant_config.json"
SIDE_FILES: Final = (ASCEND_FILE, MODELOPT_FILE)
"""Files that describe a quantisation beside config.json."""
_ASCEND: Final[Mapping[str, Scheme]] = {
    "W8A8_DYNAMIC": Scheme(group=None),
    "W8A16": Scheme(activation_bits=16, group=None),
    "W4A8_DYNAMIC": Scheme(weight_bits=4, group=None),
}
"""Types of AscendV1 that stay integers; 8-bit ones may have groups as well."""
_PATTERN: Final = "re:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFormat:
    """A format of another tool."""

    method: str
    encodings: tuple[Encoding, ...]
    """What a tensor may be stored as; a tensor that none of them claims is plain."""
    targets: tuple[tuple[str, Encoding], ...] = ()
    """compressed-tensors: module name, 're:' and a pattern, or 'Linear' -> encoding, where several claim a tensor."""
    described: Mapping[str, str] | None = None
    """AscendV1: tensor name -> type, for every tensor."""

    @property
    def keeps_integers(self) -> bool:
        """Whether some tensors stay integers in memory."""
        return any(isinstance(encoding, Integers) for encoding in self.encodings)

    def encoding_of(self, name: str, tensors: Tensors) -> Encoding:
        """How a logical tensor is stored.

        Raises:
            ConfigError: the description leaves it out.
            UnsupportedError: the description gives it another type, or its configuration does not decide between two.
        """
        if self.described is not None:
            return self._described_encoding(self.described, name, tensors)
        claiming = [encoding for encoding in self.encodings if encoding.claims(name, tensors)]
        if len(claiming) > 1:
            return self._targeted_encoding(claiming, name)
        return claiming[0] if claiming else Plain()

    def _described_encoding(self, described: Mapping[str, str], name: str, tensors: Tensors) -> Encoding:
        kind = described.get(name)
        if kind is None and name in tensors:
            raise ConfigError(f"{ASCEND_FILE} does not say how {name} is stored")
        if kind in (None, "FLOAT"):
            return Plain()
        if kind not in _ASCEND:
            known = ", ".join(map(repr, ("FLOAT", *_ASCEND)))
            raise UnsupportedError(f"{ASCEND_FILE}: {name} is {kind!r}; supported: {known}")
        by_channel, *by_group = (e for e in self.encodings if isinstance(e, Integers) and _ascend_kind(e) == kind)
        scale = tensors.get(scale_name(name))
        return by_group[0] if by_group and (scale is None or scale.shape[-1:] != (1,)) else by_channel

    def _targeted_encoding(self, claiming: Sequence[Encoding], name: str) -> Encoding:
        """The one that the tensor's module is a target of: its name goes before patterns, patterns before a class."""
        module = name.removesuffix(".weight")
        by_rank: dict[int, list[Encoding]] = {}
        for target, encoding in self.targets:
            rank = _target_rank(target, module)
            if rank is not None and encoding in claiming and encoding not in by_rank.setdefault(rank, []):
                by_rank[rank].append(encoding)
        found = by_rank[min(by_rank)] if by_rank else []
        if len(found) == 1:
            return found[0]
        labels = " or ".join(encoding.label() for encoding in found or claiming)
        why = "targets of several config_groups match it" if found else "no target of its config_groups matches it"
        raise UnsupportedError(f"{name} may be {labels}: {why}; name its module in one of them")


def _target_rank(target: str, module: str) -> int | None:
    """How closely a target names a module, 0 best; None: it does not."""
    if target == module:
        return 0
    if target.startswith(_PATTERN):
        return 1 if re.match(target.removeprefix(_PATTERN), module) else None
    return 2 if target == "Linear" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fp8:
    quant_method: str
    weight_block_size: tuple[int, ...] | None = None
    fmt: str = "e4m3"
    activation_scheme: str = "dynamic"
    scale_fmt: Any = None
    modules_to_not_convert: Any = None
    ignored_layers: Any = None


def _read_fp8(data: Mapping[str, Any], where: str) -> ForeignFormat:
    config = decode(_Fp8, data, where=where)
    block = config.weight_block_size
    if block is None or len(block) != 2 or min(block) < 1:
        shown = None if block is None else list(block)
        raise UnsupportedError(f"{where}.weight_block_size = {shown}: only FP8 with one scale a block, [128, 128]")
    # DeepSeek's word, and MiniMax's.
    _expect(where, "fmt", config.fmt, "e4m3", "float8_e4m3fn")
    _expect(where, "activation_scheme", config.activation_scheme, "dynamic")
    return ForeignFormat(method=config.quant_method, encodings=(Fp8Blocks(block=(block[0], block[1])),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelOptQuantization:
    quant_algo: str
    kv_cache_quant_algo: Any = None
    exclude_modules: Any = None
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelOpt:
    quant_method: str = "modelopt"
    quantization: _ModelOptQuantization | None = None
    quant_algo: str | None = None
    kv_cache_quant_algo: Any = None
    kv_cache_scheme: Any = None
    producer: Any = None
    group_size: int | None = None
    config_groups: Any = None
    ignore: Any = None
    exclude_modules: Any = None


def _read_modelopt(data: Mapping[str, Any], where: str) -> ForeignFormat:
    """ModelOpt writes its object into config.json, flat or nested, or into a file of its own."""
    config = decode(_ModelOpt, data, where=where)
    inner = config.quantization or config
    if inner.quant_algo is None or "MXFP8" not in inner.quant_algo.upper():
        raise UnsupportedError(f"{where}: quant_algo = {inner.quant_algo!r} is not supported, only 'MXFP8'")
    _expect(where, "group_size", inner.group_size, None, 32)
    return ForeignFormat(method=config.quant_method, encodings=(MxFp8(),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _MxFp8:
    quant_method: str
    weight_block_size: tuple[int, ...] | None = None
    fmt: str = "e4m3"
    scale_fmt: str = "ue8m0"
    activation_scheme: str = "dynamic"
    kv_cache_quant_algo: Any = None
    ignored_layers: Any = None
    modules_to_not_convert: Any = None


def _read_mxfp8(data: Mapping[str, Any], where: str) -> ForeignFormat:
    config = decode(_MxFp8, data, where=where)
    _expect(where, "weight_block_size", config.weight_block_size, None, (1, 32))
    _expect(where, "fmt", config.fmt, "e4m3")
    _expect(where, "scale_fmt", config.scale_fmt, "ue8m0")
    _expect(where, "activation_scheme", config.activation_scheme, "dynamic")
    return ForeignFormat(method=config.quant_method, encodings=(MxFp8(),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _MxFp4:
    quant_method: str
    modules_to_not_convert: Any = None


def _read_mxfp4(data: Mapping[str, Any], where: str) -> ForeignFormat:
    config = decode(_MxFp4, data, where=where)
    return ForeignFormat(method=config.quant_method, encodings=(MxFp4(),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """compressed-tensors' QuantizationArgs."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: Any = None
    dynamic: bool | str = False
    actorder: Any = None
    observer: Any = None
    observer_kwargs: Any = None
    scale_dtype: Any = None
    zp_dtype: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    targets: Any
    weights: _Numbers
    input_activations: _Numbers | None = None
    output_activations: Any = None
    format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompressedTensors:
    quant_method: str
    config_groups: Mapping[str, _Group]
    format: str
    version: Any = None
    quantization_status: str = "compressed"
    global_compression_ratio: Any = None
    ignore: Any = None
    kv_cache_scheme: Any = None
    sparsity_config: Any = None
    transform_config: Any = None


def _read_compressed_tensors(data: Mapping[str, Any], where: str) -> ForeignFormat:
    config = decode(_CompressedTensors, data, where=where)
    _expect(where, "quantization_status", config.quantization_status, "compressed")
    _expect(where, "kv_cache_scheme", config.kv_cache_scheme, None)
    # Rotations that run with the model, and sparse storage: absent, or an empty object.
    _expect(where, "sparsity_config", config.sparsity_config, None, {})
    _expect(where, "transform_config", config.transform_config, None, {})
    targets: list[tuple[str, Encoding]] = []
    for name, group in config.config_groups.items():
        place = f"{where}.config_groups.{name}"
        encoding = _group_encoding(group, group.format or config.format, place)
        targets.extend((target, encoding) for target in _checked_targets(group.targets, place))
    encodings = tuple(dict.fromkeys(encoding for _, encoding in targets))
    return ForeignFormat(method=config.quant_method, encodings=encodings, targets=tuple(targets))


def _checked_targets(targets: Any, where: str) -> tuple[str, ...]:
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"{where}.targets = {targets!r} is not a list of names of modules")
    for target in targets:
        if target.startswith(_PATTERN):
            try:
                re.compile(target.removeprefix(_PATTERN))
            except re.error as error:
                raise ConfigError(f"{where}.targets: {target!r} is no pattern: {error}") from error
    return tuple(targets)


def _group_encoding(group: _Group, storage: str, where: str) -> Encoding:
    weights = group.weights
    _expect(where, "weights.type", weights.type, "int", "float")
    _expect(where, "weights.symmetric", weights.symmetric, True)
    _expect(where, "weights.dynamic", weights.dynamic, False)
    _expect(where, "weights.actorder", weights.actorder, None, False)
    _expect(where, "output_activations", group.output_activations, None)
    return _group_fp8(group, storage, where) if weights.type == "float" else _group_integers(group, storage, where)


def _group_integers(group: _Group, storage: str, where: str) -> Encoding:
    weights, inputs = group.weights, group.input_activations
    _expect(where, "format", storage, "int-quantized", "naive-quantized", "pack-quantized")
    _expect(where, "weights.strategy", weights.strategy, "channel", "group")
    _expect(where, "weights.num_bits", weights.num_bits, 8, 4)
    size = weights.group_size if weights.strategy == "group" else None
    if weights.strategy == "group" and (size is None or size < 1):
        raise ConfigError(f"{where}.weights: strategy 'group' with group_size = {size}")
    packed = storage == "pack-quantized"
    if packed:
        _expect(where, "input_activations", inputs, None)
    if packed and weights.num_bits == 4:
        return Int4Groups(group=size)
    if inputs is not None:
        kind = (inputs.num_bits, inputs.type, inputs.symmetric, inputs.strategy, inputs.dynamic)
        _expect(where, "input_activations", kind, (8, "int", True, "token", True))
    try:
        scheme = Scheme(
            weight_bits=4 if weights.num_bits == 4 else 8, activation_bits=16 if inputs is None else 8, group=size
        )
    except RecipeError as error:
        raise UnsupportedError(f"{where}.weights: {error}") from error
    return Integers(
        scheme=scheme,
        scale_dtypes=FLOAT_DTYPES,
        flat_scales=True,
        storage="words" if packed else "bytes" if weights.num_bits == 4 else "own",
    )


def _group_fp8(group: _Group, storage: str, where: str) -> Encoding:
    """Decoded to floats, so that how activations are rounded matters only for what else is in the files."""
    weights, inputs = group.weights, group.input_activations
    _expect(where, "format", storage, "float-quantized", "naive-quantized")
    _expect(where, "weights.num_bits", weights.num_bits, 8)
    _expect(where, "weights.strategy", weights.strategy, "channel", "tensor", "block")
    if inputs is not None:
        _expect(where, "input_activations", (inputs.num_bits, inputs.type), (8, "float"))
        _expect(where, "input_activations.dynamic", inputs.dynamic, True, False)
    static = inputs is not None and inputs.dynamic is False
    if static:
        # One step a tensor is what `input_scale` is; other static ones have other shapes.
        _expect(where, "input_activations.strategy", inputs.strategy if inputs is not None else None, "tensor")
    block: tuple[int | None, int | None] = (1, None) if weights.strategy == "channel" else (None, None)
    if weights.strategy == "block":
        block = _block_structure(weights.block_structure, where)
    return Fp8Scales(block=block, static_inputs=static)


def _block_structure(value: Any, where: str) -> tuple[int, int]:
    """[128, 128], in older files "128x128"."""
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2:
        text = [str(size) for size in sizes]
        if all(size.isdecimal() and int(size) > 0 for size in text):
            return int(text[0]), int(text[1])
    raise ConfigError(f"{where}.weights: strategy 'block' with block_structure = {value!r}, which is not two sizes")


def _expect(where: str, key: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        wanted = " or ".join(map(repr, allowed))
        raise UnsupportedError(f"{where}.{key} = {value!r} is not supported, only {wanted}")


METHODS: Final[Mapping[str, Callable[[Mapping[str, Any], str], ForeignFormat]]] = {
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "mxfp8": _read_mxfp8,
    "mxfp4": _read_mxfp4,
    "compressed-tensors": _read_compressed_tensors,
}
"""quant_method -> reader of its object."""


def read_side_files(folder: Path) -> ForeignFormat | None:
    """The format that a file beside config.json describes.

    Raises:
        ConfigError: the file is damaged, or there are two.
        UnsupportedError: it describes something that this version cannot read.
    """
    found = [folder / name for name in SIDE_FILES if (folder / name).exists()]
    if len(found) > 1:
        raise ConfigError(
            f"{folder} has both {found[0].name} and {found[1].name}; keep the one that its weights follow"
        )
    if not found:
        return None
    if found[0].name == MODELOPT_FILE:
        return _read_modelopt(read_json(found[0]), str(found[0]))
    return _read_ascend(read_json(found[0]), str(found[0]))


def _read_ascend(data: Mapping[str, Any], where: str) -> ForeignFormat:
    """AscendV1: the type of each tensor by name, among a few other keys."""
    group = data.get("group_size", 0)
    if not isinstance(group, int) or isinstance(group, bool) or group < 0:
        raise ConfigError(f"{where}: group_size = {group!r} is not a whole number of at least 0")
    described = {name: kind for name, kind in data.items() if isinstance(kind, str)}
    # Types have groups or one scale a row, as their scales say; 4-bit ones have no groups.
    encodings = [_ascend_integers(scheme) for scheme in _ASCEND.values()]
    if group:
        encodings += [_ascend_integers(replace(s, group=group)) for s in _ASCEND.values() if s.weight_bits == 8]
    return ForeignFormat(method="ascend", encodings=tuple(encodings), described=described)


def _ascend_integers(scheme: Scheme) -> Integers:
    return Integers(
        scheme=scheme, scale_dtypes=FLOAT_DTYPES, offset=True, storage="own" if scheme.weight_bits == 8 else "rows"
    )


def _ascend_kind(encoding: Integers) -> str:
    channel = replace(encoding.scheme, group=None)
    return next(kind for kind, scheme in _ASCEND.items() if scheme == channel)
