"""Reads safetensors checkpoints: files and index are checked before the first tensor is read; slices are lazy."""

import difflib
import math
import operator
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import final

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.weights.header import FileHeader, TensorMeta, joined, quoted, scan_file, strict_json

INDEX_SUFFIX = ".safetensors.index.json"
_SINGLE_FILES = ("model.safetensors", "quant_model_weights.safetensors")
"""Names of an only file without an index: transformers' and msModelSlim's."""

_MAX_LISTED_FILES = 200
_MAX_LISTED_PER_FILE = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose headers, file sizes and index agree; made by `open_checkpoint`, holds no open file.

    tensors: every tensor by name, sorted by name.
    unused_files: the .safetensors files of the folder that are no part of the checkpoint.
    """

    folder: Path
    tensors: Mapping[str, TensorMeta]
    unused_files: tuple[Path, ...]

    def read(self, name: str, index: tuple[slice | int, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the part that `index` selects as numpy does, and no other bytes of the file.

        Args:
            name: A key of `tensors`.
            index: One slice (step >= 1) or integer for each leading axis; axes that are left out are read in full.

        Returns:
            An owned, writable, C-contiguous array of the tensor's dtype.

        Raises:
            WeightsError: No such tensor, an index past the end of its axis, or a file that got shorter since.
        """
        meta = self.tensors.get(name)
        if meta is None:
            raise WeightsError(self._unknown(name))
        ranges = _axis_ranges(meta, index)
        out = np.empty(_result_shape(ranges, index), meta.dtype)
        if out.size == 0:
            return out
        first_item = _first_item(meta.shape, ranges)
        try:
            if first_item is not None:
                _read_run(meta, first_item, out)
            else:
                _read_strided(meta, ranges, out)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"cannot read tensor {quoted(name)} from {meta.file}: {error}; open the checkpoint again"
            ) from error
        return out

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.tensors, n=3)
        hint = f"; the closest names are {quoted(*near)}" if near else ""
        return f"no tensor {quoted(name)} among the {len(self.tensors)} tensors of {self.folder}{hint}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Finds a checkpoint's files and checks all headers, sizes and the index against each other; reads no tensor.

    Args:
        folder: Holds model.safetensors.index.json (or one other *.safetensors.index.json) and the shards that it names,
            or one file alone, model.safetensors or quant_model_weights.safetensors.

    Raises:
        WeightsError: With every problem found: files that are missing, truncated, not fully covered or not safetensors;
            an index that does not agree with its files; a tensor that is in two files or has an unknown dtype.
    """
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise WeightsError(f"checkpoint folder {folder} {state}; give the folder that holds the .safetensors files")
    present = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    index = _find_index(folder)
    if index is None:
        files = [_single_file(folder, present)]
        shards = [scan_file(file) for file in files]
        problems: list[str] = []
    else:
        weight_map = _read_index(index)
        files = sorted(set(weight_map.values()))
        shards = [scan_file(file) for file in files if os.path.isfile(file)]
        problems = _missing_problems(index, files, present) + _index_problems(index, weight_map, shards)
    problems += [
        f"{shard.file}: {joined(shard.problems, limit=_MAX_LISTED_PER_FILE)}" for shard in shards if shard.problems
    ]
    if problems:
        raise WeightsError(f"checkpoint {folder} cannot be used: {joined(problems)}")
    tensors = {name: meta for shard in shards for name, meta in shard.tensors.items()}
    if not tensors:
        raise WeightsError(f"checkpoint {folder} has no tensors: {quoted(*(file.name for file in files))} declare none")
    return Checkpoint(
        folder=folder,
        tensors=MappingProxyType(dict(sorted(tensors.items()))),
        unused_files=tuple(path for path in present if path not in files),
    )


def _find_index(folder: Path) -> Path | None:
    found = sorted(path for path in folder.glob(f"*{INDEX_SUFFIX}") if not path.name.startswith("."))
    default = folder / f"model{INDEX_SUFFIX}"
    if default in found:
        return default
    if len(found) > 1:
        names = quoted(*(path.name for path in found))
        raise WeightsError(f"checkpoint {folder} has {len(found)} index files, {names}; keep the one to load")
    return found[0] if found else None


def _single_file(folder: Path, present: Sequence[Path]) -> Path:
    file = next((folder / name for name in _SINGLE_FILES if folder / name in present), None)
    if file is not None:
        return file
    if not present:
        raise WeightsError(f"no weights in {folder}: no *{INDEX_SUFFIX} and no .safetensors file")
    raise WeightsError(
        f"{folder} has {len(present)} .safetensors file(s) but neither model{INDEX_SUFFIX} nor model.safetensors: "
        f"{quoted(*(path.name for path in present))}; add the index, or name a single file model.safetensors"
    )


def _read_index(index: Path) -> dict[str, Path]:
    """Reads the index: the shard of each tensor, as a path inside the index's folder."""
    try:
        content = strict_json(index.read_bytes())
    except OSError as error:
        raise WeightsError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{index} is not valid JSON: {error}; copy it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        found = "nothing" if weight_map is None else f"{type(weight_map).__name__} {str(weight_map)[:40]!r}"
        raise WeightsError(f"{index}: weight_map must be an object of tensor name to file name, found {found}")
    not_text = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if not_text:
        raise WeightsError(f"{index}: weight_map gives no file name but another type for {quoted(*not_text)}")
    outside = sorted({file for file in weight_map.values() if not _stays_inside(file)})
    if outside:
        raise WeightsError(f"{index} names files outside its folder: {quoted(*outside)}; refused")
    return {name: index.parent / file for name, file in weight_map.items()}


def _stays_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
        and "\\" not in file
        and file.isprintable()
    )


def _missing_problems(index: Path, files: Sequence[Path], present: Sequence[Path]) -> list[str]:
    missing = [str(file.relative_to(index.parent)) for file in files if not os.path.isfile(file)]
    if not missing:
        return []
    unnamed = [path.name for path in present if path not in files]
    stale = f"; the folder has files that the index does not name: {quoted(*unnamed)} (stale index?)" if unnamed else ""
    return [
        f"{len(missing)} of the {len(files)} files that {index.name} names are missing: "
        f"{quoted(*missing, limit=_MAX_LISTED_FILES)}{stale}; copy index and files from one revision"
    ]


def _index_problems(index: Path, weight_map: Mapping[str, Path], shards: Sequence[FileHeader]) -> list[str]:
    """Compares the index with the files that could be read: both must place the same tensors in the same files."""
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for shard in shards:
        for name in shard.names or ():
            places[name].append(shard.file)
    readable = {shard.file for shard in shards if shard.names is not None}
    problems = []
    twice = sorted(name for name, files in places.items() if len(files) > 1)
    if twice:
        where = ", ".join(file.name for file in places[twice[0]])
        problems.append(f"{len(twice)} tensor(s) are in more than one file: {quoted(*twice)} (the first in {where})")
    lacking = sorted(name for name, file in weight_map.items() if file in readable and file not in places.get(name, ()))
    unnamed = sorted(name for name, files in places.items() if len(files) == 1 and weight_map.get(name) != files[0])
    if lacking or unnamed:
        problems.append(
            f"{index.name} does not match its files (stale index?): "
            f"{len(lacking)} tensor(s) are not in the file that it names [{quoted(*lacking)}], "
            f"{len(unnamed)} tensor(s) are in a file that it does not name for them [{quoted(*unnamed)}]; "
            "copy index and files from one revision"
        )
    return problems


def _axis_ranges(meta: TensorMeta, index: tuple[slice | int, ...]) -> list[range]:
    """Turns an index into the positions it selects on each axis of the tensor; refuses what lies outside."""
    if len(index) > len(meta.shape):
        raise WeightsError(f"tensor {quoted(meta.name)} of shape {meta.shape} got an index of {len(index)} axes")
    ranges = []
    for axis, size in enumerate(meta.shape):
        item = index[axis] if axis < len(index) else slice(None)
        where = f"of axis {axis} of tensor {quoted(meta.name)}, shape {meta.shape}"
        if not isinstance(item, slice):
            position = operator.index(item)
            if not -size <= position < size:
                raise WeightsError(f"index {position} {where}, is out of range")
            ranges.append(range(position % size, position % size + 1))
            continue
        for bound in (item.start, item.stop):
            if bound is not None and not -size <= operator.index(bound) <= size:
                raise WeightsError(f"slice bound {bound} {where}, is out of range")
        if item.step is not None and operator.index(item.step) < 1:
            raise WeightsError(f"slice step {item.step} {where}, is not at least 1")
        ranges.append(range(*item.indices(size)))
    return ranges


def _result_shape(ranges: Sequence[range], index: tuple[slice | int, ...]) -> tuple[int, ...]:
    return tuple(
        len(positions) for axis, positions in enumerate(ranges) if axis >= len(index) or isinstance(index[axis], slice)
    )


def _first_item(shape: tuple[int, ...], ranges: Sequence[range]) -> int | None:
    """The item at which a non-empty selection starts, if its items lie one after the other; else None."""
    axis = next((axis for axis, positions in enumerate(ranges) if len(positions) > 1), len(shape))
    inner_is_full = all(
        len(positions) == size for positions, size in zip(ranges[axis + 1 :], shape[axis + 1 :], strict=True)
    )
    if axis < len(shape) and (ranges[axis].step != 1 or not inner_is_full):
        return None
    return sum(positions.start * math.prod(shape[i + 1 :]) for i, positions in enumerate(ranges))


def _read_run(meta: TensorMeta, first_item: int, out: np.ndarray) -> None:
    """Fills `out` with the items of the file that follow each other from `first_item` on."""
    buffer = out.reshape(-1).view(np.uint8).data
    with meta.file.open("rb", buffering=0) as stream:
        stream.seek(meta.offset_bytes + first_item * meta.dtype.itemsize)
        while len(buffer):
            count = stream.readinto(buffer)
            if not count:
                raise ValueError(f"the file ends {len(buffer)} bytes early")
            buffer = buffer[count:]


def _read_strided(meta: TensorMeta, ranges: Sequence[range], out: np.ndarray) -> None:
    """Fills `out` from a map of the file; only the pages that hold selected items are read."""
    bits = np.dtype(f"u{meta.dtype.itemsize}")
    source = np.memmap(meta.file, dtype=bits, mode="r", offset=meta.offset_bytes, shape=meta.shape)
    selected = source[tuple(slice(positions.start, positions.stop, positions.step) for positions in ranges)]
    np.copyto(out.view(bits), selected.reshape(out.shape))
