"""Encodings: how one logical tensor [.., out, in] or [width] lies in a checkpoint's files.

An encoding knows the tensors that make it up, and reads any slice of what they stand for from only the bytes that hold
it. Decoded encodings end as floats. `Integers` stay as they are: their values and scales become a QArray.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, final

import ml_dtypes
import numpy as np

from jaxmoe.errors import RecipeError, UnsupportedError, WeightsError
from jaxmoe.models.leaves import scale_name
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.packing import (
    int8_to_pairs,
    pairs_to_int8,
    rows_to_int8,
    rows_to_pairs,
)
from jaxmoe.weights.safetensors import Checkpoint

FLOAT_DTYPES: Final = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
FLOAT32: Final = (np.dtype(np.float32),)
INT8: Final = (np.dtype(np.int8),)
UINT8: Final = (np.dtype(np.uint8),)
FP8: Final = (np.dtype(ml_dtypes.float8_e4m3fn),)
INT32: Final = (np.dtype("<i4"),)

Index = tuple[slice, ...]
"""One slice of step >= 1 for every axis of a logical tensor (of its scales, where those are read)."""
Tensors = Mapping[str, TensorMeta]
Storage = Literal["own", "bytes", "rows", "words"]
"""How integers lie in the files.

own: INT8 [.., out, in], or our own 4-bit pairs (see `quant.int4`) under the name plus "_packed".
bytes: 4 bits in an INT8 each (compressed-tensors `int-quantized`).
rows: 4 bits [.., out / 2, in], row 2j in the low nibbles of row j and row 2j + 1 in the high ones, in two's complement
    (AscendV1 W4A8_DYNAMIC).
words: 8 bits plus 128, four to a little-endian 32-bit word (compressed-tensors `pack-quantized`).
"""


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
class Integers(Encoding):
    """Symmetric integers of 8 or 4 bits with one float scale a group of inputs, which a QArray takes as they are."""

    suffixes: ClassVar[Mapping[str, str]] = {
        "_scale": "",
        "_packed": "",
        "_offset": "",
        "_shape": "",
        ".scale_bias": ".weight",
    }
    scheme: Scheme
    scale_dtypes: tuple[np.dtype, ...] = FLOAT32
    """Dtypes that scales may have on disk; in memory they are float32."""
    flat_scales: bool = False
    """Whether one scale an output may be stored without the axis of groups."""
    offset: bool = False
    """Whether `_offset` tensors are there too, all zero (AscendV1)."""
    storage: Storage = "own"

    def label(self) -> str:
        """See `Encoding`."""
        where = {"own": "", "bytes": ", one a byte", "rows": ", rows in pairs", "words": ", in words"}[self.storage]
        return f"INT{self.scheme.weight_bits} ({self.scheme.name}{where})"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        need_matrix(name, shape, self)
        groups = self.scheme.scales_shape(shape)
        flat = (shape[:-1],) if self.flat_scales and self.scheme.group is None else ()
        parts = [
            self._values_part(name, shape),
            Part(name=scale_name(name), shapes=(groups, *flat), dtypes=self.scale_dtypes),
        ]
        if self.offset:
            parts.append(Part(name=f"{name}_offset", shapes=(groups,), dtypes=FLOAT_DTYPES))
        if self.storage == "words":
            parts.append(shape_part(name, shape))
        if self.storage == "rows":
            # 8 times the sum of a row's weights, or of each sixteenth of it: what its kernel takes off again.
            sums = ((*shape[:-1], 1), (*shape[:-1], 16))
            parts.append(Part(name=module_part(name, "scale_bias"), shapes=sums, dtypes=FLOAT_DTYPES))
        return tuple(parts)

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        if self.storage == "words":
            return claims_packed(name, tensors)
        others = [f"{name}_offset"] if self.offset else []
        others += [module_part(name, "scale_bias")] if self.storage == "rows" else []
        # Scales alone do not tell: packed and FP8 tensors have them under the same name.
        others += [] if is_packed(name, tensors) or has(tensors, name, FP8) else [scale_name(name)]
        return has(tensors, name, INT8) or any(part in tensors for part in others)

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        part, groups = groups_of(index[-1], shape[-1], self.scheme.group_size(shape[-1]))
        scales = self.read_scales(checkpoint, name, (*index[:-1], part))
        values = self._integers(checkpoint, name, shape, index).astype(np.float32)
        values *= np.take(scales, groups, axis=-1)
        return values

    def read_values(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """The integers at `index` in the form of a QArray: the last axis counts bytes where a byte holds two.

        Raises:
            WeightsError: a value is not one of its bits, or the parts contradict each other.
        """
        if self.scheme.weight_bits == 8:
            return self._integers(checkpoint, name, shape, index)
        if self.storage == "own":
            return checkpoint.read(values_name(name, self.scheme), index)
        group = self.scheme.group_size(shape[-1])
        covering, columns = cover(index[-1], shape[-1] // 2, group // 2)
        whole = (*index[:-1], slice(covering.start * group, min(covering.stop * group, shape[-1])))
        if self.storage == "bytes":
            return int8_to_pairs(self._integers(checkpoint, name, shape, whole), group)[..., columns]
        packed, rows = self._packed_rows(checkpoint, name, shape, whole)
        return rows_to_pairs(packed, group)[..., rows, columns]

    def read_scales(self, checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
        """The float32 scales [.., out, groups] at `index`.

        Raises:
            WeightsError: one is not positive and finite, or an offset is not zero.
        """
        scale, offset = scale_name(name), f"{name}_offset"
        flat = len(checkpoint.tensors[scale].shape) < len(index)
        scales = checkpoint.read(scale, index[:-1] if flat else index)
        scales = (scales[..., None] if flat else scales).astype(np.float32)
        check_scales(scale, scales, zero=False)
        if self.offset and checkpoint.read(offset, index).any():
            raise WeightsError(f"{offset} is not zero: only symmetric quantisation is supported")
        return scales

    def _values_part(self, name: str, shape: tuple[int, ...]) -> Part:
        try:
            own = self.scheme.values_shape(shape)
        except RecipeError as error:
            raise UnsupportedError(f"{name}: {error}") from error
        if self.storage == "own":
            return Part(name=values_name(name, self.scheme), shapes=(own,), dtypes=(self.scheme.values_dtype,))
        if self.storage == "bytes":
            return Part(name=name, shapes=(shape,), dtypes=INT8)
        if self.storage == "words":
            words = (*shape[:-1], count_of(shape[-1], 4))
            return Part(name=f"{name}_packed", shapes=(words,), dtypes=INT32)
        if shape[-2] % 2:
            raise UnsupportedError(f"{name} of shape {list(shape)}: {shape[-2]} rows cannot be stored in pairs")
        return Part(name=name, shapes=((*shape[:-2], shape[-2] // 2, shape[-1]),), dtypes=INT8)

    def _integers(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """The integers [.., out, in] at `index`, one a byte."""
        if self.storage == "words":
            check_shape(checkpoint, name, shape)
            words, columns = cover(index[-1], shape[-1], 4)
            codes = checkpoint.read(f"{name}_packed", (*index[:-1], words)).view(np.uint8)[..., columns]
            return (codes ^ np.uint8(128)).view(np.int8)
        if self.storage == "rows":
            packed, rows = self._packed_rows(checkpoint, name, shape, index)
            return rows_to_int8(packed)[..., rows, :]
        if self.scheme.weight_bits == 8:
            return checkpoint.read(name, index)
        if self.storage == "bytes":
            values = checkpoint.read(name, index)
            # In place, so that a large weight is not copied to be checked; two's complement is taken as it is.
            if values.size and (values.min() < -8 or values.max() > 7):
                raise WeightsError(f"{name}: a value is outside -8..7, which 4 bits hold")
            return values
        group = self.scheme.group_size(shape[-1])
        covering, columns = cover(index[-1], shape[-1], group)
        half = slice(covering.start * group // 2, min(covering.stop * group, shape[-1]) // 2)
        pairs = checkpoint.read(values_name(name, self.scheme), (*index[:-1], half))
        return pairs_to_int8(pairs, group)[..., columns]

    @staticmethod
    def _packed_rows(
        checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index
    ) -> tuple[np.ndarray, slice]:
        """(rows of the file that hold some rows, where those are among the rows that they hold)."""
        covering, rows = cover(index[-2], shape[-2], 2)
        return checkpoint.read(name, (*index[:-2], covering, index[-1])).view(np.uint8), rows


def values_name(tensor: str, scheme: Scheme) -> str:
    """Name of the integers of a tensor: its own, or 'x.weight_packed' where a byte holds two."""
    return tensor if scheme.weight_bits == 8 else f"{tensor}_packed"


def module_part(tensor: str, part: str) -> str:
    """Name of a tensor beside a weight: 'x.up_proj.weight' -> 'x.up_proj.scale_bias'."""
    return f"{tensor.removesuffix('.weight')}.{part}"


def cover(part: slice, size: int, width: int) -> tuple[slice, slice]:
    """(groups of `width` elements that hold a part of an axis, the part within those groups)."""
    positions = range(*part.indices(size))
    first = positions[0] // width
    last = positions[-1] // width
    start = positions[0] - first * width
    return slice(first, last + 1), slice(start, start + positions[-1] - positions[0] + 1, positions.step)


def groups_of(part: slice, size: int, width: int) -> tuple[slice, np.ndarray]:
    """(groups that hold a part of an axis, which of those groups each element of the part is in)."""
    covering, _ = cover(part, size, width)
    return covering, np.arange(*part.indices(size)) // width - covering.start


def count_of(size: int, width: int) -> int:
    """Groups of `width` in an axis; the last one may be shorter."""
    return -(-size // width)


def has(tensors: Tensors, name: str, dtypes: tuple[np.dtype, ...]) -> bool:
    """Whether a tensor is there in one of some dtypes."""
    return name in tensors and tensors[name].dtype in dtypes


def need_matrix(name: str, shape: tuple[int, ...], encoding: Encoding) -> None:
    """Refuses a vector.

    Raises:
        UnsupportedError: it is one.
    """
    if len(shape) < 2:
        raise UnsupportedError(f"{name} of shape {list(shape)} cannot be stored as {encoding.label()}")


def is_packed(name: str, tensors: Tensors) -> bool:
    """Whether a tensor lies in words of compressed-tensors."""
    return f"{name}_packed" in tensors or f"{name}_shape" in tensors


def claims_packed(name: str, tensors: Tensors) -> bool:
    """`Encoding.claims` of what lies in words."""
    return is_packed(name, tensors) or (name not in tensors and scale_name(name) in tensors)


def shape_part(name: str, shape: tuple[int, ...]) -> Part:
    """The tensor that states the shape of what lies in words."""
    return Part(name=f"{name}_shape", shapes=((len(shape),),), dtypes=(*INT32, np.dtype("<i8")))


def check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Compares it with the model.

    Raises:
        WeightsError: they differ.
    """
    stated = tuple(checkpoint.read(f"{name}_shape").tolist())
    if stated != shape:
        raise WeightsError(f"{name}_shape says {list(stated)}, config.json asks for {list(shape)}")


def check_scales(name: str, scales: np.ndarray, *, zero: bool) -> None:
    """Refuses scales that casts would hide; zero is a legal scale of a block of zeros in some formats."""
    if not (np.isfinite(scales).all() and (scales >= 0 if zero else scales > 0).all()):
        raise WeightsError(f"{name}: a scale is {'' if zero else 'zero, '}negative, infinite or NaN")
