"""The files that tasks of a quantisation hand to each other: a folder that all processes see.

A key is one safetensors file. It has its final name only when all its bytes are on disk, so that a task may be run
again, by anybody, while others read what it wrote before.
"""

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, final

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.weights.header import scan_file
from jaxmoe.weights.layout import TensorSpec, plan_shards, publish


@final
class WorkFolder:
    """Arrays by key; holds nothing in memory."""

    def __init__(self, root: Path) -> None:
        """Args: root: made when something is saved."""
        self._root = root

    def save(self, key: str, arrays: Mapping[str, np.ndarray | None]) -> None:
        """Saves the arrays that are there under a key, instead of what was there.

        Raises:
            WeightsError: the disk refuses.
        """
        # Not ascontiguousarray, which gives a number an axis.
        present = {name: np.asarray(array, order="C") for name, array in arrays.items() if array is not None}
        with self.filling(key, {name: (array.dtype, array.shape) for name, array in present.items()}) as places:
            for name, array in present.items():
                places[name][...] = array

    @contextmanager
    def filling(
        self, key: str, arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
    ) -> Iterator[Mapping[str, np.ndarray]]:
        """Arrays of the given dtypes and shapes to be filled in place; they are the key's when the block ends.

        What is written goes to the file, not to memory.

        Raises:
            WeightsError: the disk refuses.
        """
        specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in arrays.items()]
        path = self._path(key)
        # Of everybody's own: two processes may do the same task.
        fresh = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
        (plan,) = plan_shards(specs, max_shard_bytes=1 << 62)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as stream:
                stream.write(plan.head)
                # Not a file of holes: a full disk is an error here, and would be a signal when a page is written.
                # macOS has no such call.
                allocate = getattr(os, "posix_fallocate", None)
                if allocate is None:
                    stream.truncate(plan.nbytes)
                else:
                    allocate(stream.fileno(), 0, plan.nbytes)
            yield {
                spec.name: _mapped(fresh, spec.dtype, spec.shape, plan.offsets_bytes[spec.name], "r+") for spec in specs
            }
            publish(fresh, path)
        except OSError as error:
            raise WeightsError(f"cannot keep intermediate results in {path}: {error}") from error
        finally:
            fresh.unlink(missing_ok=True)

    def load(self, key: str) -> dict[str, np.ndarray]:
        """All arrays of a key, mapped from its file.

        Raises:
            WeightsError: it is missing or damaged: somebody changed the folder.
        """
        path = self._path(key)
        try:
            header = scan_file(path)
            if header.problems:
                raise WeightsError(f"the intermediate results in {path} are damaged: {'; '.join(header.problems)}")
            return {
                name: _mapped(path, meta.dtype, meta.shape, meta.offset_bytes, "r")
                for name, meta in header.tensors.items()
            }
        except OSError as error:
            raise WeightsError(f"cannot read back the intermediate results in {path}: {error}") from error

    def array(self, key: str, name: str) -> np.ndarray:
        """One array of a key.

        Raises:
            WeightsError: see `load`.
        """
        return self.load(key)[name]

    def remove(self, key: str) -> None:
        """Removes all keys below a folder; nothing to do if there are none."""
        shutil.rmtree(self._root / key, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self._root / f"{key}.safetensors"


def _mapped(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], offset_bytes: int, mode: Literal["r", "r+"]
) -> np.ndarray:
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, mode, offset_bytes, shape)
