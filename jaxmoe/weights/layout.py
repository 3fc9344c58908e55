"""Where each tensor of a checkpoint lies: shards, headers and offsets, fixed before the first one arrives.

A file has its final name only when all its bytes are on disk.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.weights.header import DTYPES, MAX_HEADER_BYTES, quoted

_ALIGN_BYTES = 64
_CODES: Mapping[np.dtype, str] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})
MAX_SHARD_BYTES = 4 << 30


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that will be written: its name, its dtype (one of `DTYPES`) and its shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """A shard: its file name, its first bytes, and where each of its tensors starts, in bytes of the file."""

    file_name: str
    head: bytes
    offsets_bytes: Mapping[str, int]

    nbytes: int
    """Size of the file."""


def model_shard(number: int, of: int) -> str:
    """File name of a shard, as transformers writes it."""
    return f"model-{number:05d}-of-{of:05d}.safetensors"


MODEL_INDEX = "model.safetensors.index.json"


def plan_shards(
    specs: Sequence[TensorSpec],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    file_name: Callable[[int, int], str] = model_shard,
) -> list[ShardPlan]:
    """The shards of a checkpoint.

    Args:
        specs: all tensors; they fill the shards in this order.
        max_shard_bytes: most bytes of tensor data per shard; a tensor that is larger gets a shard of its own.
        metadata: text for the __metadata__ of every shard, such as {"format": "pt"} as transformers writes.
        file_name: of shard n of m.

    Raises:
        WeightsError: a spec that cannot be stored, or a name that is given twice.
    """
    _check_specs(specs, max_shard_bytes)
    groups = _fill_shards(specs, max_shard_bytes)
    return [
        _plan_shard(file_name(number, len(groups)), group, metadata) for number, group in enumerate(groups, start=1)
    ]


def index_text(specs: Sequence[TensorSpec], plans: Sequence[ShardPlan]) -> str:
    """The index file of a checkpoint."""
    files = {name: plan.file_name for plan in plans for name in plan.offsets_bytes}
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
        "weight_map": dict(sorted(files.items())),
    }
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def _check_specs(specs: Sequence[TensorSpec], max_shard_bytes: int) -> None:
    if not specs:
        raise WeightsError("a checkpoint needs at least one tensor, none was declared")
    if max_shard_bytes < 1:
        raise WeightsError(f"max_shard_bytes is {max_shard_bytes}, must be at least 1")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen or spec.name == "__metadata__":
            reason = "is declared twice" if spec.name in seen else "has a name that the format reserves"
            raise WeightsError(f"tensor {quoted(spec.name)} {reason}")
        if spec.dtype not in _CODES:
            known = ", ".join(str(dtype) for dtype in _CODES)
            raise WeightsError(f"tensor {quoted(spec.name)} has dtype {spec.dtype}, which is none of {known}")
        if any(size < 0 for size in spec.shape):
            raise WeightsError(f"tensor {quoted(spec.name)} has the negative shape {spec.shape}")
        seen.add(spec.name)


def _fill_shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Cuts the specs, in order, into shards of at most `max_shard_bytes`, or of one tensor that is larger."""
    shards: list[list[TensorSpec]] = [[]]
    filled_bytes = 0
    for spec in specs:
        if shards[-1] and filled_bytes + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(spec)
        filled_bytes += spec.nbytes
    return shards


def _plan_shard(file_name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> ShardPlan:
    """Lays out one shard: widest items first, so that each tensor starts at a multiple of its item size."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts_bytes: dict[str, int] = {}
    end_bytes = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        starts_bytes[spec.name] = end_bytes
        end_bytes += spec.nbytes
        offsets = [starts_bytes[spec.name], end_bytes]
        header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise WeightsError(
            f"the header of {file_name} has {len(text)} bytes for {len(specs)} tensors, at most {MAX_HEADER_BYTES} "
            "are legal; choose a smaller max_shard_bytes"
        )
    head = len(text).to_bytes(8, "little") + text
    return ShardPlan(
        file_name=file_name,
        head=head,
        offsets_bytes={name: len(head) + start for name, start in starts_bytes.items()},
        nbytes=len(head) + end_bytes,
    )


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a UTF-8 file so that `path` has either its former content or all of `text`, even if the machine stops.

    Raises:
        WeightsError: The disk refuses; `path` is as before.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8"))
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WeightsError(f"cannot write {path}: {error}") from error


def write_at(path: Path, offset_bytes: int, array: np.ndarray) -> None:
    """Writes an array's bytes at a place of a file that is there."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    with path.open("r+b", buffering=0) as stream:
        while len(data):
            count = os.pwrite(stream.fileno(), data, offset_bytes)
            data, offset_bytes = data[count:], offset_bytes + count


def publish(temporary: Path, path: Path) -> None:
    """Gives a complete file its final name once its bytes are on disk, and makes the name durable."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Makes what was written to a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
