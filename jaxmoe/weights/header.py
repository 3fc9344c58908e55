"""The header of one safetensors file: parsed, and checked against the size of the file, without reading any tensor.

A file is an 8 byte little-endian header length H, H bytes of JSON, and the data. The JSON maps each tensor's name to
its dtype, shape and data_offsets = [begin, end), counted from byte 8 + H. Invariants: end - begin = product(shape) *
itemsize; sorted by begin, each tensor starts where the one before it ends; the last one ends where the file ends.

Source: https://github.com/huggingface/safetensors (format section of the README).
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import ml_dtypes
import numpy as np

from jaxmoe.errors import WeightsError

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "I16": np.dtype("<i2"),
        "I32": np.dtype("<i4"),
        "I64": np.dtype("<i8"),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F16": np.dtype("<f2"),
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
    }
)
MAX_HEADER_BYTES = 100_000_000

_MAX_LISTED = 10
_MAX_NAME_CHARS = 160
_MAX_RANK = 32
_LFS_MARK = b"version "


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Where one tensor lies: nbytes = product(shape) * dtype.itemsize bytes of `file`, row-major, from `offset_bytes`.

    `offset_bytes` counts from the start of the file and need not be a multiple of the item size.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What the header of `file` declares; usable only where `problems` is empty.

    names: all declared tensors; None if the header could not be read.
    tensors: those of `names` whose entry could be understood.
    problems: sentences that do not repeat the file's name.
    """

    file: Path
    names: frozenset[str] | None
    tensors: Mapping[str, TensorMeta]
    problems: tuple[str, ...]


def scan_file(file: Path) -> FileHeader:
    """Reads and checks the header of one file; what is wrong is returned in `problems`, not raised."""
    try:
        header, data_start, file_bytes = _read_header(file)
    except OSError as error:
        return FileHeader(file=file, names=None, tensors={}, problems=(f"cannot be read: {error.strerror}",))
    except WeightsError as error:
        return FileHeader(file=file, names=None, tensors={}, problems=(str(error),))
    problems: list[str] = []
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append("__metadata__ is not an object of text values")
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorMeta] = {}
    for name, entry in header.items():
        if not _is_entry(entry):
            problems.append(f"the entry of tensor {quoted(name)} is malformed: {repr(entry)[:_MAX_NAME_CHARS]}")
            continue
        begin, end = entry["data_offsets"]
        spans.append((begin, end, name))
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            known = ", ".join(DTYPES)
            problems.append(f"tensor {quoted(name)} has the unknown dtype {quoted(entry['dtype'])}; known are {known}")
            continue
        meta = TensorMeta(
            name=name, dtype=dtype, shape=tuple(entry["shape"]), file=file, offset_bytes=data_start + begin
        )
        if meta.nbytes != end - begin:
            problems.append(
                f"tensor {quoted(name)} of {entry['dtype']}{list(meta.shape)} needs {meta.nbytes} bytes, "
                f"its data_offsets give {end - begin}"
            )
        tensors[name] = meta
    problems += _coverage_problems(spans, data_start, file_bytes, complete=len(spans) == len(header))
    return FileHeader(file=file, names=frozenset(header), tensors=tensors, problems=tuple(problems))


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Reads a file's header: its JSON object, the byte at which the data starts, and the size of the file in bytes."""
    with file.open("rb") as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise WeightsError(f"truncated: expected at least 8 bytes, found {file_bytes}; copy it again")
        if prefix == _LFS_MARK:
            raise WeightsError("holds text, not tensors; if it is a git-lfs pointer, run git lfs pull")
        header_bytes = int.from_bytes(prefix, "little")
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise WeightsError(
                f"header length {header_bytes} is not within 2..{MAX_HEADER_BYTES}; not a safetensors file"
            )
        if file_bytes < 8 + header_bytes:
            raise WeightsError(
                f"truncated in its header: expected at least {8 + header_bytes} bytes, found {file_bytes}; "
                "copy it again"
            )
        raw = stream.read(header_bytes)
    try:
        header = strict_json(raw)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"header is not valid JSON: {error}; copy it again") from error
    if not isinstance(header, dict) or not raw.startswith(b"{"):
        raise WeightsError("header is not a JSON object that starts at byte 8; copy it again")
    return header, 8 + header_bytes, file_bytes


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list):
        return False
    numbers = [*shape, *offsets]
    return (
        all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        and len(shape) <= _MAX_RANK
        and math.prod(size for size in shape if size) < 1 << 59
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    )


def _coverage_problems(
    spans: Sequence[tuple[int, int, str]], data_start: int, file_bytes: int, *, complete: bool
) -> list[str]:
    """Checks that spans (begin, end, name) tile the data; `complete` says that no entry of the header is left out."""
    data_end = data_start + max((end for _, end, _ in spans), default=0)
    if file_bytes < data_end:
        return [f"truncated: expected {data_end} bytes, found {file_bytes}; copy it again"]
    if not complete:
        return []
    problems = []
    position = 0
    for begin, end, name in sorted(spans):
        if begin > position:
            problems.append(
                f"file not fully covered: {begin - position} bytes at offset {data_start + position} before tensor "
                f"{quoted(name)} belong to no tensor"
            )
        elif begin < position:
            problems.append(
                f"tensor {quoted(name)} overlaps the tensor before it: starts {position - begin} bytes early "
                f"at offset {data_start + begin}"
            )
        position = max(position, end)
    if file_bytes > data_end:
        problems.append(
            f"file not fully covered: {file_bytes - data_end} bytes at offset {data_end} follow the last tensor; "
            "copy it again"
        )
    return problems


def strict_json(data: bytes) -> Any:
    """Parses UTF-8 JSON and refuses a key that is given twice; raises ValueError or RecursionError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = [key for key, _ in pairs if key in seen or seen.add(key)]
            raise ValueError(f"given twice: {quoted(*twice)}")
        return result

    return json.loads(data.decode("utf-8"), object_pairs_hook=unique)


def quoted(*names: str, limit: int = _MAX_LISTED) -> str:
    """Lists names for a message: at most `limit` of them, quoted, cut where long, then how many more there are."""
    shown = [repr(name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}...") for name in names[:limit]]
    return joined([*shown, *names[limit:]], limit=limit, separator=", ")


def joined(items: Sequence[str], *, limit: int = _MAX_LISTED, separator: str = "; ") -> str:
    """Joins items for a message: at most `limit` of them, then how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
