"""Shards that several threads, processes and hosts fill at once, and that a killed run takes up again.

The layout is planned from the declared tensors, so that every writer knows where its bytes go: each writes its own
tensors in place, and nothing is copied or merged at the end. What is complete is the caller's to know: files have
temporary names until `publish`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.weights.header import quoted
from jaxmoe.weights.layout import ShardPlan, TensorSpec, index_text, publish, sync, write_at, write_text_atomic


@final
class ShardFiles:
    """The shards of one checkpoint; holds no open file, and is safe for use from several threads and processes."""

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], plans: Sequence[ShardPlan], index_name: str) -> None:
        """Nothing is touched yet.

        Args:
            folder: where the shards go.
            specs: all tensors.
            plans: of `plan_shards(specs)`.
            index_name: of the index file.
        """
        self._folder, self._plans, self._index_name = folder, tuple(plans), index_name
        self._specs = {spec.name: spec for spec in specs}
        self._plan_of = {name: plan for plan in plans for name in plan.offsets_bytes}

    @property
    def sha256(self) -> str:
        """Of all headers: two layouts with the same have the same tensors at the same places."""
        digest = hashlib.sha256()
        for plan in self._plans:
            digest.update(plan.file_name.encode() + b"\0" + plan.head)
        return digest.hexdigest()

    @property
    def are_there(self) -> bool:
        """Whether all files have been made, by any name."""
        return all(self._final(plan).exists() or self._temporary(plan).exists() for plan in self._plans)

    def create(self) -> None:
        """Makes the files that are not there, full of zeros behind their headers.

        Raises:
            WeightsError: the disk refuses, or a file of another layout is there.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for plan in self._plans:
                if self._final(plan).exists():
                    continue
                path = self._temporary(plan)
                if not path.exists():
                    fresh = path.with_name(f"{path.name}.new")
                    with fresh.open("wb") as stream:
                        stream.write(plan.head)
                        stream.truncate(plan.nbytes)
                    fresh.replace(path)
                with path.open("rb") as stream:
                    if stream.read(len(plan.head)) != plan.head or path.stat().st_size != plan.nbytes:
                        raise WeightsError(f"{path} has another layout than this quantisation; remove {self._folder}")
        except OSError as error:
            raise WeightsError(f"cannot make the shards of {self._folder}: {error}") from error

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes a whole tensor.

        Raises:
            WeightsError: see `write_rows`.
        """
        spec = self._spec(name)
        if array.shape != spec.shape:
            raise WeightsError(
                f"tensor {quoted(name)} was declared as {spec.dtype}{list(spec.shape)}, written as {list(array.shape)}"
            )
        self._write(spec, 0, array)

    def write_rows(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes rows (the first axis) `start`.. of a tensor, in any order.

        Raises:
            WeightsError: an undeclared name, another dtype or shape than declared, or a failing disk.
        """
        spec = self._spec(name)
        if rows.shape[1:] != spec.shape[1:] or not 0 <= start < start + len(rows) <= spec.shape[0]:
            raise WeightsError(
                f"tensor {quoted(name)} was declared as {spec.dtype}{list(spec.shape)}; rows {start} to "
                f"{start + len(rows)} came as {list(rows.shape)}"
            )
        self._write(spec, start * (spec.nbytes // spec.shape[0]), rows)

    def make_durable(self, names: Iterable[str]) -> None:
        """Waits until what was written to the shards of these tensors is on disk.

        Raises:
            WeightsError: the disk fails.
        """
        try:
            for path in sorted({self._temporary(self._plan_of[name]) for name in names}):
                sync(path)
        except OSError as error:
            raise WeightsError(f"cannot write to {self._folder}: {error}") from error

    def publish(self) -> None:
        """Gives the shards their final names and writes the index; the caller knows that all is written.

        Raises:
            WeightsError: the disk fails.
        """
        try:
            for plan in self._plans:
                if not self._final(plan).exists():
                    publish(self._temporary(plan), self._final(plan))
        except OSError as error:
            raise WeightsError(f"cannot finish {self._folder}: {error}") from error
        write_text_atomic(self._folder / self._index_name, index_text(list(self._specs.values()), self._plans))

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise WeightsError(f"tensor {quoted(name)} was not declared among the {len(self._specs)} tensors to write")
        return self._specs[name]

    def _write(self, spec: TensorSpec, offset_bytes: int, array: np.ndarray) -> None:
        if array.dtype != spec.dtype:
            raise WeightsError(f"tensor {quoted(spec.name)} was declared as {spec.dtype}, written as {array.dtype}")
        plan = self._plan_of[spec.name]
        try:
            write_at(self._temporary(plan), plan.offsets_bytes[spec.name] + offset_bytes, array)
        except OSError as error:
            raise WeightsError(f"cannot write tensor {quoted(spec.name)} to {self._folder}: {error}") from error

    def _final(self, plan: ShardPlan) -> Path:
        return self._folder / plan.file_name

    def _temporary(self, plan: ShardPlan) -> Path:
        return self._folder / f"{plan.file_name}.tmp"
