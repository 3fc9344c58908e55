"""Quantised checkpoints of other tools: what their configuration says, as encodings that tensors may use.

Keys that change what the stored numbers mean are checked, keys that do not are listed, all others are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jaxmoe.decode import decode, read_json
from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.leaves import scale_name
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.encodings import (
    FLOAT_DTYPES,
    Encoding,
    Fp8Blocks,
    Int4Groups,
    Integers,
    MxFp4,
    MxFp8,
    Plain,
    Tensors,
)

ASCEND_FILE: Final = "quant_model_description.json"
MODELOPT_FILE: Final = "hf_quant_config.json"
SIDE_FILES: Final = (ASCEND_FILE, MODELOPT_FILE)
"""Files that describe a quantisation beside config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFormat:
    """A format of another tool."""

    method: str
    encodings: tuple[Encoding, ...]
    """What a tensor may be stored as, tried in this order; a tensor that none of them claims is plain."""
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
            UnsupportedError: the description gives it another type.
        """
        if self.described is not None:
            return self._described_encoding(self.described, name, tensors)
        return next((encoding for encoding in self.encodings if encoding.claims(name, tensors)), Plain())

    def _described_encoding(self, described: Mapping[str, str], name: str, tensors: Tensors) -> Encoding:
        kind = described.get(name)
        if kind is None and name in tensors:
            raise ConfigError(f"{ASCEND_FILE} does not say how {name} is stored")
        if kind in (None, "FLOAT"):
            return Plain()
        if kind != "W8A8_DYNAMIC":
            raise UnsupportedError(f"{ASCEND_FILE}: {name} is {kind!r}; supported: 'FLOAT', 'W8A8_DYNAMIC'")
        by_channel, *by_group = self.encodings
        scale = tensors.get(scale_name(name))
        return by_group[0] if by_group and (scale is None or scale.shape[-1:] != (1,)) else by_channel


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
    by_kind: dict[type[Encoding], Encoding] = {}
    for name, group in config.config_groups.items():
        encoding = _group_encoding(group, group.format or config.format, f"{where}.config_groups.{name}")
        if by_kind.setdefault(type(encoding), encoding) != encoding:
            raise UnsupportedError(
                f"{where}.config_groups: {encoding.label()} beside {by_kind[type(encoding)].label()}; groups that "
                "differ in their scales or activations are not supported"
            )
    # The packed form first: the names of its parts tell it from the other one.
    order = (Int4Groups, Integers)
    encodings = tuple(by_kind[kind] for kind in order if kind in by_kind)
    return ForeignFormat(method=config.quant_method, encodings=encodings)


def _group_encoding(group: _Group, storage: str, where: str) -> Encoding:
    weights = group.weights
    _expect(where, "weights.type", weights.type, "int")
    _expect(where, "weights.symmetric", weights.symmetric, True)
    _expect(where, "weights.dynamic", weights.dynamic, False)
    _expect(where, "weights.actorder", weights.actorder, None, False)
    _expect(where, "weights.strategy", weights.strategy, "channel", "group")
    _expect(where, "output_activations", group.output_activations, None)
    size = weights.group_size if weights.strategy == "group" else None
    if weights.strategy == "group" and (size is None or size < 1):
        raise ConfigError(f"{where}.weights: strategy 'group' with group_size = {size}")
    if storage == "pack-quantized":
        _expect(where, "weights.num_bits", weights.num_bits, 4)
        _expect(where, "input_activations", group.input_activations, None)
        return Int4Groups(group=size)
    _expect(where, "format", storage, "int-quantized", "naive-quantized", "pack-quantized")
    _expect(where, "weights.num_bits", weights.num_bits, 8)
    inputs = group.input_activations
    if inputs is not None:
        kind = (inputs.num_bits, inputs.type, inputs.symmetric, inputs.strategy, inputs.dynamic)
        _expect(where, "input_activations", kind, (8, "int", True, "token", True))
    return Integers(
        scheme=Scheme(activation_bits=16 if inputs is None else 8, group=size),
        scale_dtypes=FLOAT_DTYPES,
        flat_scales=True,
    )


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
    groups = (None, group) if group else (None,)
    return ForeignFormat(
        method="ascend",
        encodings=tuple(Integers(scheme=Scheme(group=size), scale_dtypes=FLOAT_DTYPES, offset=True) for size in groups),
        described=described,
    )
