"""Writes safetensors checkpoints in a stream: the layout is fixed by the declared tensors before the first one arrives.

A shard has its final name only when all its bytes are on disk, and the index appears only when all shards do.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import final

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.weights.header import DTYPES, MAX_HEADER_BYTES, quoted

_ALIGN_BYTES = 64
_CODES: Mapping[np.dtype, str] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})


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
class _ShardPlan:
    """A shard: its file name, its first bytes, and where each of its tensors starts, in bytes of the file."""

    file_name: str
    head: bytes
    offsets_bytes: Mapping[str, int]


@final
class CheckpointWriter:
    """Writes declared tensors to shards, in any order; the bytes on disk do not depend on that order.

    As a context manager it finishes the checkpoint; if the body raises, it removes the shards that are not complete
    and writes no index. It holds no open file, and is not for use from several threads.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        *,
        max_shard_bytes: int = 4 << 30,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Plans the shards and creates the folder.

        Args:
            folder: Must hold no safetensors files.
            specs: All tensors; they fill the shards in this order.
            max_shard_bytes: Most bytes of tensor data per shard; a tensor that is larger gets a shard of its own.
            metadata: Text for the __metadata__ of every shard, such as {"format": "pt"} as transformers writes.

        Raises:
            WeightsError: A spec that cannot be stored, a name that is given twice, or a folder that is in use.
        """
        self._folder = folder
        self._specs = {spec.name: spec for spec in specs}
        _check_specs(specs, max_shard_bytes)
        groups = _fill_shards(specs, max_shard_bytes)
        self._plans = [
            _plan_shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group, metadata)
            for number, group in enumerate(groups, start=1)
        ]
        self._plan_of = {name: plan for plan in self._plans for name in plan.offsets_bytes}
        self._unwritten = {plan.file_name: set(plan.offsets_bytes) for plan in self._plans}
        self._written_rows: dict[str, int] = {}
        self._begun: set[str] = set()
        self._closed = False
        _claim_folder(folder)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed:
            return
        try:
            if kind is None:
                self.finish()
        finally:
            if not self._closed:
                self._closed = True
                for plan in self._plans:
                    self._temporary(plan).unlink(missing_ok=True)

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes one declared tensor; the last one of a shard gives the shard its final name.

        Raises:
            WeightsError: An undeclared name, a second write, another dtype or shape than declared, or a failing disk.
        """
        spec = self._claim(name)
        if array.dtype != spec.dtype or array.shape != spec.shape or name in self._written_rows:
            raise WeightsError(
                f"tensor {quoted(name)} was declared as {spec.dtype}{list(spec.shape)}, "
                f"written as {array.dtype}{list(array.shape)}"
                + (f" after {self._written_rows[name]} rows" if name in self._written_rows else "")
            )
        self._write(name, 0, array)
        self._complete(name)

    def write_rows(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes some rows (the first axis) of a declared tensor; they come in order, and the last ones complete it.

        Args:
            name: A declared tensor with at least one axis.
            start: The first row, which is the number of rows written before.
            rows: At least one row.

        Raises:
            WeightsError: See `write`; or rows that are not the next ones.
        """
        spec = self._claim(name)
        done = self._written_rows.get(name, 0)
        stop = start + len(rows)
        if (
            rows.dtype != spec.dtype
            or rows.shape[1:] != spec.shape[1:]
            or start != done
            or not start < stop <= spec.shape[0]
        ):
            raise WeightsError(
                f"tensor {quoted(name)} was declared as {spec.dtype}{list(spec.shape)}, of which {done} rows are "
                f"written; rows {start} to {stop} came as {rows.dtype}{list(rows.shape)}"
            )
        self._write(name, start * (spec.nbytes // spec.shape[0]), rows)
        self._written_rows[name] = stop
        if stop == spec.shape[0]:
            self._complete(name)

    def _claim(self, name: str) -> TensorSpec:
        """The spec of a tensor that may be written now."""
        spec = self._specs.get(name)
        if self._closed:
            raise WeightsError(f"cannot write tensor {quoted(name)}: the writer of {self._folder} is closed")
        if spec is None:
            raise WeightsError(f"tensor {quoted(name)} was not declared among the {len(self._specs)} tensors to write")
        plan = self._plan_of[name]
        if name not in self._unwritten[plan.file_name]:
            raise WeightsError(f"tensor {quoted(name)} was already written to {plan.file_name}")
        return spec

    def _write(self, name: str, offset_bytes: int, array: np.ndarray) -> None:
        plan = self._plan_of[name]
        try:
            if plan.file_name not in self._begun:
                self._temporary(plan).write_bytes(plan.head)
                self._begun.add(plan.file_name)
            _write_at(self._temporary(plan), plan.offsets_bytes[name] + offset_bytes, array)
        except OSError as error:
            raise WeightsError(f"cannot write tensor {quoted(name)} to {self._folder}: {error}") from error

    def _complete(self, name: str) -> None:
        """Counts a tensor as written; its shard too, if it was the last."""
        plan = self._plan_of[name]
        unwritten = self._unwritten[plan.file_name]
        try:
            if unwritten == {name}:
                _publish(self._temporary(plan), self._folder / plan.file_name)
        except OSError as error:
            raise WeightsError(f"cannot write tensor {quoted(name)} to {self._folder}: {error}") from error
        unwritten.remove(name)

    def finish(self) -> None:
        """Writes the index, which makes the checkpoint complete.

        Raises:
            WeightsError: A declared tensor was not written, the writer is closed, or the disk fails.
        """
        if self._closed:
            raise WeightsError(f"the writer of {self._folder} is closed")
        unwritten = [name for name in self._specs if name in self._unwritten[self._plan_of[name].file_name]]
        if unwritten:
            raise WeightsError(
                f"{len(unwritten)} of the {len(self._specs)} declared tensors were not written to {self._folder}: "
                f"{quoted(*unwritten)}"
            )
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in self._specs.values())},
            "weight_map": {name: self._plan_of[name].file_name for name in sorted(self._specs)},
        }
        write_text_atomic(
            self._folder / "model.safetensors.index.json", json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        )
        self._closed = True

    def _temporary(self, plan: _ShardPlan) -> Path:
        return self._folder / f"{plan.file_name}.tmp"


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a UTF-8 file so that `path` has either its former content or all of `text`, even if the machine stops.

    Raises:
        WeightsError: The disk refuses; `path` is as before.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8"))
        _publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WeightsError(f"cannot write {path}: {error}") from error


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


def _claim_folder(folder: Path) -> None:
    """Creates the folder; refuses one with safetensors files, finished or not, rather than mixing two checkpoints."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir() if ".safetensors" in path.name)
    except OSError as error:
        raise WeightsError(f"cannot use {folder} for a checkpoint: {error.strerror}") from error
    if found:
        raise WeightsError(
            f"{folder} already holds {len(found)} safetensors file(s): {quoted(*found)}; "
            "remove them or choose another folder"
        )


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


def _plan_shard(file_name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None) -> _ShardPlan:
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
    return _ShardPlan(
        file_name=file_name,
        head=head,
        offsets_bytes={name: len(head) + start for name, start in starts_bytes.items()},
    )


def _write_at(path: Path, offset_bytes: int, array: np.ndarray) -> None:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    with path.open("r+b", buffering=0) as stream:
        while len(data):
            count = os.pwrite(stream.fileno(), data, offset_bytes)
            data, offset_bytes = data[count:], offset_bytes + count


def _publish(temporary: Path, path: Path) -> None:
    """Gives a complete file its final name once its bytes are on disk, and makes the name durable."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
