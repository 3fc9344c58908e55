"""Encodings that are decoded to floats: FP8 with scales for blocks, rows or tensors, MX formats, INT4 in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np

from jaxmoe.errors import UnsupportedError, WeightsError
from jaxmoe.models.leaves import scale_name
from jaxmoe.weights.encodings import (
    FLOAT_DTYPES,
    FP8,
    INT8,
    INT32,
    UINT8,
    Encoding,
    Index,
    Part,
    Tensors,
    check_scales,
    check_shape,
    claims_packed,
    count_of,
    cover,
    groups_of,
    has,
    is_packed,
    module_part,
    need_matrix,
    shape_part,
)
from jaxmoe.weights.packing import (
    Decode,
    decode_scaled,
    fp4_to_float,
    fp8_to_float,
    offset_int4_to_float,
    powers_of_two,
)
from jaxmoe.weights.safetensors import Checkpoint

_MX_GROUP: Final = 32
"""Elements that share a scale in every MX format."""


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
        need_matrix(name, shape, self)
        blocks = (*shape[:-2], count_of(shape[-2], self.block[0]), count_of(shape[-1], self.block[1]))
        return (
            Part(name=name, shapes=(shape,), dtypes=FP8),
            Part(name=f"{name}_scale_inv", shapes=(blocks,), dtypes=(np.dtype(np.float32), FLOAT_DTYPES[2])),
        )

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        return has(tensors, name, FP8) or f"{name}_scale_inv" in tensors

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        return _read_fp8(checkpoint, name, f"{name}_scale_inv", shape, index, self.block)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scales(Encoding):
    """FP8 of compressed-tensors (`float-quantized`): one float scale a row, a tensor, or a block of both axes."""

    suffixes: ClassVar[Mapping[str, str]] = {"_scale": "", ".input_scale": ".weight"}
    block: tuple[int | None, int | None]
    """Rows and columns that share a scale; None: all of them. The last ones of an axis may be fewer."""
    static_inputs: bool = False
    """Whether `input_scale` is there too, the step of activations that other engines round: unused with floats."""

    def label(self) -> str:
        """See `Encoding`."""
        rows, columns = self.block
        if columns is not None:
            return f"FP8 in blocks of {rows}x{columns}, scales under '_scale'"
        return f"FP8 with one scale a {'tensor' if rows is None else 'channel'}"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """See `Encoding`."""
        need_matrix(name, shape, self)
        rows, columns = self._block(shape)
        blocks = (*shape[:-2], count_of(shape[-2], rows), count_of(shape[-1], columns))
        # Axes of one scale for the whole axis may be left out.
        shorter = [blocks[:-1]] if self.block[1] is None else []
        shorter += [blocks[:-2]] if self.block == (None, None) else []
        parts = [
            Part(name=name, shapes=(shape,), dtypes=FP8),
            Part(name=scale_name(name), shapes=(blocks, *shorter), dtypes=FLOAT_DTYPES),
        ]
        if self.static_inputs:
            parts.append(Part(name=module_part(name, "input_scale"), shapes=((1,), ()), dtypes=FLOAT_DTYPES))
        return tuple(parts)

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        if has(tensors, name, INT8) or is_packed(name, tensors):
            return False
        step = self.static_inputs and module_part(name, "input_scale") in tensors
        return has(tensors, name, FP8) or scale_name(name) in tensors or step

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        return _read_fp8(checkpoint, name, scale_name(name), shape, index, self._block(shape))

    def _block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = self.block
        return shape[-2] if rows is None else rows, shape[-1] if columns is None else columns


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
        need_matrix(name, shape, self)
        groups = (*shape[:-1], count_of(shape[-1], _MX_GROUP))
        return (
            Part(name=name, shapes=(shape,), dtypes=FP8),
            Part(name=scale_name(name), shapes=(groups,), dtypes=UINT8),
        )

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        return has(tensors, name, FP8) or scale_name(name) in tensors

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
        need_matrix(name, shape, self)
        if shape[-1] % _MX_GROUP:
            raise UnsupportedError(f"{name}: {shape[-1]} inputs are no multiple of {_MX_GROUP}, which MXFP4 needs")
        blocks = (*shape[:-1], shape[-1] // _MX_GROUP)
        return (
            Part(name=name, shapes=((*blocks, _MX_GROUP // 2),), dtypes=UINT8),
            Part(name=self._scales(name), shapes=(blocks,), dtypes=UINT8),
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
        need_matrix(name, shape, self)
        groups = (*shape[:-1], count_of(shape[-1], self._width(shape)))
        return (
            Part(name=f"{name}_packed", shapes=((*shape[:-1], -(-shape[-1] // 8)),), dtypes=INT32),
            Part(name=scale_name(name), shapes=(groups,), dtypes=FLOAT_DTYPES),
            shape_part(name, shape),
        )

    def claims(self, name: str, tensors: Tensors) -> bool:
        """See `Encoding`."""
        return claims_packed(name, tensors)

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """See `Encoding`."""
        check_shape(checkpoint, name, shape)
        words, columns = cover(index[-1], shape[-1], 8)
        codes = checkpoint.read(f"{name}_packed", (*index[:-1], words)).view(np.uint8)
        part, groups = groups_of(index[-1], shape[-1], self._width(shape))
        scales = checkpoint.read(scale_name(name), (*index[:-1], part)).astype(np.float32)
        check_scales(scale_name(name), scales, zero=True)
        return _decode_rows(name, codes, offset_int4_to_float, columns, scales, groups)

    def _width(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if self.group is None else self.group


def _read_fp8(
    checkpoint: Checkpoint, name: str, scale: str, shape: tuple[int, ...], index: Index, block: tuple[int, int]
) -> np.ndarray:
    """A part of a matrix in FP8 with a float scale for each block; last axes of the scales may be left out."""
    rows, row_groups = groups_of(index[-2], shape[-2], block[0])
    columns, column_groups = groups_of(index[-1], shape[-1], block[1])
    rank = len(checkpoint.tensors[scale].shape)
    scales = checkpoint.read(scale, (*index[:-2], rows, columns)[:rank]).astype(np.float32)
    check_scales(scale, scales, zero=True)
    scales = scales.reshape(*scales.shape, *(1,) * (len(shape) - rank))
    codes = checkpoint.read(name, index).view(np.uint8)
    return _finite(name, decode_scaled(codes, fp8_to_float, slice(None), scales, row_groups, column_groups))


def _read_powers(checkpoint: Checkpoint, scale: str, index: Index, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(scales of the groups that a part needs, the group of each of its columns)."""
    part, groups = groups_of(index[-1], size, _MX_GROUP)
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
