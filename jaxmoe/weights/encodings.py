"""Encodings: how one logical tensor [.., out, in] or [width] lies in a checkpoint's files.

An encoding knows the tensors that make it up, and reads any slice of what they stand for from only the bytes that hold
it. Decoded encodings end as floats. `Integers` stay as they are: their values and scales become a QArray.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, final

import ml_dtypes
import numpy as np

from jaxmoe.errors import UnsupportedError, WeightsError
from jaxmoe.models.leaves import scale_name
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.packing import (
    Decode,
    decode_scaled,
    fp4_to_float,
    fp8_to_float,
    offset_int4_to_float,
    pairs_to_int8,
    powers_of_two,
)
from jaxmoe.weights.safetensors import Checkpoint

FLOAT_DTYPES: Final = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
_FLOAT32: Final = (np.dtype(np.float32),)
_INT8: Final = (np.dtype(np.int8),)
_UINT8: Final = (np.dtype(np.uint8),)
_INT32: Final = (np.dtype("<i4"),)
_FP8: Final = (np.dtype(ml_dtypes.float8_e4m3fn),)
_MX_GROUP: Final = 32
"""Elements that share a scale in every MX format."""

Index = tuple[slice, ...]
"""One slice of step >= 1 for every axis of a logical tensor (of its scales, where those are read)."""
Tensors = Mapping[str, TensorMeta]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of the files."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes that it may have, the usual one first."""
    dtypes: tuple[np.dtype, ...]


class Encoding(ABC):
    """One way to store a tensor."""

    __slots__ = ()

    suffixes: ClassVar[Mapping[str, str]] = {}
    """Endings of the parts' names that are no tensor's own, and what stands there in the logical name."""

    @abstractmethod
    def label(self) -> str:
        """What to call it in a message."""

    @abstractmethod
    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The tensors that make up the logical tensor `name`, the main one first.

        Raises:
            UnsupportedError: a tensor of this shape cannot be stored so.
        """

    @abstractmethod
    def claims(self, name: str, tensors: Tensors) -> bool:
        """Whether any part that only this encoding has is there: then all of them must be."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """The values at `index` as floats: float32, or the stored dtype where that is a float.

        Raises:
            WeightsError: a value or a scale is not finite, or the parts contradict each other.
        """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Encoding):
    """A float tensor as it is."""

    def label(self) -> str:
        """See `Encoding`."""
        return "plain floats"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        return (Part(name=name, shapes=(shape,), dtypes=FLOAT_DTYPES),)

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        return name in tensors and tensors[name].dtype in FLOAT_DTYPES

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        return checkpoint.read(name, index)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Blocks(Encoding):
    """FP8 with one float scale for each block of rows and columns. Source: DeepSeek-V3, README_WEIGHTS.md."""

    suffixes: ClassVar[Mapping[str, str]] = {"_scale_inv": ""}
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block; the last ones may be shorter."""

    def label(self) -> str:
        """See `Encoding`."""
        return f"FP8 in blocks of {self.block[0]}x{self.block[1]}"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        _need_matrix(name, shape, self)
        blocks = (*shape[:-2], _count(shape[-2], self.block[0]), _count(shape[-1], self.block[1]))
        return (
            Part(name=name, shapes=(shape,), dtypes=_FP8),
            Part(name=f"{name}_scale_inv", shapes=(blocks,), dtypes=(np.dtype(np.float32), FLOAT_DTYPES[2])),
        )

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        return _is(tensors, name, _FP8) or f"{name}_scale_inv" in tensors

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        codes = checkpoint.read(name, index).view(np.uint8)
        rows, row_groups = _groups(index[-2], shape[-2], self.block[0])
        columns, column_groups = _groups(index[-1], shape[-1], self.block[1])
        scale = f"{name}_scale_inv"
        scales = checkpoint.read(scale, (*index[:-2], rows, columns)).astype(np.float32)
        _check_scales(scale, scales, zero=True)
        return _finite(name, decode_scaled(codes, fp8_to_float, slice(None), scales, row_groups, column_groups))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MxFp8(Encoding):
    """FP8 with one power-of-two scale for 32 inputs. Source: OCP Microscaling Formats 1.0; ModelOpt's tensor names."""

    suffixes: ClassVar[Mapping[str, str]] = {"_scale": ""}

    def label(self) -> str:
        """See `Encoding`."""
        return "MXFP8"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        _need_matrix(name, shape, self)
        groups = (*shape[:-1], _count(shape[-1], _MX_GROUP))
        return (
            Part(name=name, shapes=(shape,), dtypes=_FP8),
            Part(name=scale_name(name), shapes=(groups,), dtypes=_UINT8),
        )

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        return _is(tensors, name, _FP8) or scale_name(name) in tensors

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        codes = checkpoint.read(name, index).view(np.uint8)
        scales, groups = _read_powers(checkpoint, scale_name(name), index, shape[-1])
        return _decode_rows(name, codes, fp8_to_float, slice(None), scales, groups)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MxFp4(Encoding):
    """FP4 in blocks of 32 inputs with one power-of-two scale each. Source: the gpt-oss checkpoints.

    The logical name is that of the blocks [.., out, in / 32, 16].
    """

    suffixes: ClassVar[Mapping[str, str]] = {"_scales": "_blocks"}

    def label(self) -> str:
        """See `Encoding`."""
        return "MXFP4"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        _need_matrix(name, shape, self)
        if shape[-1] % _MX_GROUP:
            raise UnsupportedError(f"{name}: {shape[-1]} inputs are no multiple of {_MX_GROUP}, which MXFP4 needs")
        blocks = (*shape[:-1], shape[-1] // _MX_GROUP)
        return (
            Part(name=name, shapes=((*blocks, _MX_GROUP // 2),), dtypes=_UINT8),
            Part(name=self._scales(name), shapes=(blocks,), dtypes=_UINT8),
        )

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        return name.endswith("_blocks")

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        blocks, columns = cover(index[-1], shape[-1], _MX_GROUP)
        raw = checkpoint.read(name, (*index[:-1], blocks))
        codes = raw.reshape(*raw.shape[:-2], -1)
        scales, groups = _read_powers(checkpoint, self._scales(name), index, shape[-1])
        return _decode_rows(name, codes, fp4_to_float, columns, scales, groups)

    @staticmethod
    def _scales(name: str) -> str:
        return f"{name.removesuffix('_blocks')}_scales"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Groups(Encoding):
    """INT4, eight to a 32-bit word, one float scale a group of inputs. Source: compressed-tensors `pack-quantized`.

    Words are little-endian, the lowest nibble first; a nibble stores the value plus 8.
    """

    suffixes: ClassVar[Mapping[str, str]] = {"_packed": "", "_shape": "", "_scale": ""}
    group: int | None
    """None: one scale for each output."""

    def label(self) -> str:
        """See `Encoding`."""
        return "packed INT4"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        _need_matrix(name, shape, self)
        groups = (*shape[:-1], _count(shape[-1], self._width(shape)))
        return (
            Part(name=f"{name}_packed", shapes=((*shape[:-1], -(-shape[-1] // 8)),), dtypes=_INT32),
            Part(name=scale_name(name), shapes=(groups,), dtypes=FLOAT_DTYPES),
            Part(name=f"{name}_shape", shapes=((len(shape),),), dtypes=(*_INT32, np.dtype("<i8"))),
        )

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        packed = f"{name}_packed" in tensors or f"{name}_shape" in tensors
        return packed or (name not in tensors and scale_name(name) in tensors)

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        stated = tuple(checkpoint.read(f"{name}_shape").tolist())
        if stated != shape:
            raise WeightsError(f"{name}_shape says {list(stated)}, config.json asks for {list(shape)}")
        words, columns = cover(index[-1], shape[-1], 8)
        codes = checkpoint.read(f"{name}_packed", (*index[:-1], words)).view(np.uint8)
        part, groups = _groups(index[-1], shape[-1], self._width(shape))
        scales = checkpoint.read(scale_name(name), (*index[:-1], part)).astype(np.float32)
        _check_scales(scale_name(name), scales, zero=True)
        return _decode_rows(name, codes, offset_int4_to_float, columns, scales, groups)

    def _width(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if self.group is None else self.group


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Integers(Encoding):
    """Symmetric INT8, or our own 4-bit pairs (see `quant.int4`), with one float scale a group of inputs."""

    suffixes: ClassVar[Mapping[str, str]] = {"_scale": "", "_packed": "", "_offset": ""}
    scheme: Scheme
    scale_dtypes: tuple[np.dtype, ...] = _FLOAT32
    """Dtypes that scales may have on disk; in memory they are float32."""
    flat_scales: bool = False
    """Whether one scale an output may be stored without the axis of groups."""
    offset: bool = False
    """Whether `_offset` tensors are there too, all zero (AscendV1)."""

    def label(self) -> str:
        """See `Encoding`."""
        return f"INT{self.scheme.weight_bits} ({self.scheme.name})"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        _need_matrix(name, shape, self)
        groups = self.scheme.scales_shape(shape)
        flat = (shape[:-1],) if self.flat_scales and self.scheme.group is None else ()
        values = (self.scheme.values_shape(shape),)
        parts = [
            Part(name=values_name(name, self.scheme), shapes=values, dtypes=(self.scheme.values_dtype,)),
            Part(name=scale_name(name), shapes=(groups, *flat), dtypes=self.scale_dtypes),
        ]
        if self.offset:
            parts.append(Part(name=f"{name}_offset", shapes=(groups,), dtypes=FLOAT_DTYPES))
        return tuple(parts)

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        parts = [scale_name(name), *([f"{name}_offset"] if self.offset else [])]
        return _is(tensors, name, _INT8) or any(part in tensors for part in parts)

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        group = self.scheme.group_size(shape[-1])
        part, groups = _groups(index[-1], shape[-1], group)
        scales = self.read_scales(checkpoint, name, (*index[:-1], part))
        if self.scheme.weight_bits == 8:
            values = self.read_values(checkpoint, name, index).astype(np.float32)
        else:
            _, columns = cover(index[-1], shape[-1], group)
            half = slice(part.start * group // 2, min(part.stop * group, shape[-1]) // 2)
            values = pairs_to_int8(self.read_values(checkpoint, name, (*index[:-1], half)), group)
            values = values[..., columns].astype(np.float32)
        values *= np.take(scales, groups, axis=-1)
        return values

    def read_values(self, checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
        """The integers at `index` in the form of a QArray: the last axis counts bytes where a byte holds two."""
        return checkpoint.read(values_name(name, self.scheme), index)

    def read_scales(self, checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
        """The float32 scales [.., out, groups] at `index`.

        Raises:
            WeightsError: one is not positive and finite, or an offset is not zero.
        """
        scale, offset = scale_name(name), f"{name}_offset"
        flat = len(checkpoint.tensors[scale].shape) < len(index)
        scales = checkpoint.read(scale, index[:-1] if flat else index)
        scales = (scales[..., None] if flat else scales).astype(np.float32)
        _check_scales(scale, scales, zero=False)
        if self.offset and checkpoint.read(offset, index).any():
            raise WeightsError(f"{offset} is not zero: only symmetric quantisation is supported")
        return scales


def values_name(tensor: str, scheme: Scheme) -> str:
    """Name of the integers of a tensor: its own, or 'x.weight_packed' where a byte holds two."""
    return tensor if scheme.weight_bits == 8 else f"{tensor}_packed"


def cover(part: slice, size: int, width: int) -> tuple[slice, slice]:
    """(groups of `width` elements that hold a part of an axis, the part within those groups)."""
    positions = range(*part.indices(size))
    first = positions[0] // width
    last = positions[-1] // width
    start = positions[0] - first * width
    return slice(first, last + 1), slice(start, start + positions[-1] - positions[0] + 1, positions.step)


def _groups(part: slice, size: int, width: int) -> tuple[slice, np.ndarray]:
    """(groups that hold a part of an axis, which of those groups each element of the part is in)."""
    covering, _ = cover(part, size, width)
    return covering, np.arange(*part.indices(size)) // width - covering.start


def _count(size: int, width: int) -> int:
    return -(-size // width)


def _is(tensors: Tensors, name: str, dtypes: tuple[np.dtype, ...]) -> bool:
    return name in tensors and tensors[name].dtype in dtypes


def _need_matrix(name: str, shape: tuple[int, ...], encoding: Encoding) -> None:
    if len(shape) < 2:
        raise UnsupportedError(f"{name} of shape {list(shape)} cannot be stored as {encoding.label()}")


def _read_powers(checkpoint: Checkpoint, scale: str, index: Index, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(scales of the groups that a part needs, the group of each of its columns)."""
    part, groups = _groups(index[-1], size, _MX_GROUP)
    codes = checkpoint.read(scale, (*index[:-1], part))
    if (codes == 255).any():
        raise WeightsError(f"{scale}: a scale has exponent 255, which is NaN")
    return powers_of_two(codes), groups


def _decode_rows(
    name: str, codes: np.ndarray, decode: Decode, columns: slice, scales: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Decodes with scales of their own for each row."""
    rows = np.arange(codes.shape[-2])
    return _finite(name, decode_scaled(codes, decode, columns, scales, rows, groups))


def _finite(name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise WeightsError(f"{name}: a decoded value is NaN or infinite")
    return values


def _check_scales(name: str, scales: np.ndarray, *, zero: bool) -> None:
    """Refuses scales that casts would hide; zero is a legal scale of a block of zeros in some formats."""
    if not (np.isfinite(scales).all() and (scales >= 0 if zero else scales > 0).all()):
        raise WeightsError(f"{name}: a scale is {'' if zero else 'zero, '}negative, infinite or NaN")
