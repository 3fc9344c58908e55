"""Writes safetensors checkpoints in a stream: the layout is fixed by the declared tensors before the first one arrives.

A shard has its final name only when all its bytes are on disk, and the index appears only when all shards do.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.weights.header import quoted
from jaxmoe.weights.layout import (
    MAX_SHARD_BYTES,
    MODEL_INDEX,
    ShardPlan,
    TensorSpec,
    index_text,
    plan_shards,
    publish,
    write_at,
    write_text_atomic,
)

__all__ = ["CheckpointWriter", "TensorSpec", "write_text_atomic"]


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
        max_shard_bytes: int = MAX_SHARD_BYTES,
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
        self._plans = plan_shards(specs, max_shard_bytes=max_shard_bytes, metadata=metadata)
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
            write_at(self._temporary(plan), plan.offsets_bytes[name] + offset_bytes, array)
        except OSError as error:
            raise WeightsError(f"cannot write tensor {quoted(name)} to {self._folder}: {error}") from error

    def _complete(self, name: str) -> None:
        """Counts a tensor as written; its shard too, if it was the last."""
        plan = self._plan_of[name]
        unwritten = self._unwritten[plan.file_name]
        try:
            if unwritten == {name}:
                publish(self._temporary(plan), self._folder / plan.file_name)
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
        text = index_text(list(self._specs.values()), self._plans)
        write_text_atomic(self._folder / MODEL_INDEX, text)
        self._closed = True

    def _temporary(self, plan: ShardPlan) -> Path:
        return self._folder / f"{plan.file_name}.tmp"


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
