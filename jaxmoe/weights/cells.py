"""Cells: one layer's, or one expert's, own matrix or vector of a parameter, wherever a checkpoint keeps it.

A parameter [layers, experts, out, in] is a stack of cells [out, in]. A checkpoint has a tensor for each cell, or one
for all experts of a layer, and may share a tensor between two parameters.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, final

import ml_dtypes
import numpy as np

from jaxmoe.models.manifest import Entry
from jaxmoe.weights.encodings import Encoding, Index, Integers, Plain
from jaxmoe.weights.safetensors import Checkpoint


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a parameter."""

    position: tuple[int, ...]
    """Its place on the parameter's leading axes: (), (layer,) or (layer, expert)."""
    tensor: str
    """Logical tensor that holds it."""
    row: int | None
    """Its place on the tensor's axis of experts; None: the tensor has no such axis."""

    @property
    def label(self) -> str:
        """What to call it in a message."""
        return self.tensor if self.row is None else f"{self.tensor}[{self.row}]"


def cell_axes(entry: Entry) -> int:
    """Leading axes of a parameter that count cells: layers and experts."""
    return (entry.axes[:1] == ("layers",)) + ("experts" in entry.axes)


def cell_shape(entry: Entry) -> tuple[int, ...]:
    """Shape of one cell."""
    return entry.shape[cell_axes(entry) :]


def hub_cells(entry: Entry) -> Iterator[Cell]:
    """All cells of a parameter and where the checkpoint has them, layer by layer."""
    return _cells(entry, entry.tensors())


def own_cells(entry: Entry) -> Iterator[Cell]:
    """`hub_cells` of our own checkpoints."""
    return _cells(entry, entry.own_tensors())


def _cells(entry: Entry, tensors: Iterable[tuple[tuple[int, ...], str]]) -> Iterator[Cell]:
    axes = cell_axes(entry)
    for position, tensor in tensors:
        if len(position) == axes:
            yield Cell(position=position, tensor=tensor, row=None)
            continue
        assert len(position) == axes - 1 and "experts" in entry.axes, (entry.path, tensor)
        for expert in range(entry.shape[axes - 1]):
            yield Cell(position=(*position, expert), tensor=tensor, row=expert)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How a logical tensor is stored."""

    shape: tuple[int, ...]
    encoding: Encoding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint by logical tensors."""

    checkpoint: Checkpoint
    stored: Mapping[str, Stored]

    def read(
        self, entry: Entry, cell: Cell, index: Index, part: Literal["float", "values", "scale"] = "float"
    ) -> np.ndarray:
        """A part of a cell, and no other bytes of the files.

        Args:
            entry: the parameter.
            cell: one of its `hub_cells`.
            index: one slice for each axis of the cell; the last one selects bytes or groups where `part` has those.
            part: the weight as floats, or the integers or the scales of a weight that keeps them.

        Raises:
            WeightsError: a value or a scale is illegal.
        """
        stored = self.stored[cell.tensor]
        encoding, where = stored.encoding, _tensor_index(entry, cell, index)
        if part == "float":
            array = encoding.read(self.checkpoint, cell.tensor, stored.shape, where)
        else:
            assert isinstance(encoding, Integers) and not entry.view.transposed, cell
            array = (
                encoding.read_values(self.checkpoint, cell.tensor, stored.shape, where)
                if part == "values"
                else encoding.read_scales(self.checkpoint, cell.tensor, where)
            )
        array = array.reshape(array.shape[len(where) - len(index) :])
        return array.swapaxes(-1, -2) if entry.view.transposed else array

    def stored_dtype(self, cell: Cell) -> np.dtype | None:
        """Dtype of a plain tensor; None: it is decoded."""
        plain = isinstance(self.stored[cell.tensor].encoding, Plain)
        return self.checkpoint.tensors[cell.tensor].dtype if plain else None

    def dtype(self, entry: Entry, cell: Cell) -> np.dtype:
        """Dtype of the floats that `read` gives."""
        return self.stored_dtype(cell) or np.dtype(np.float32)

    def kept_dtype(self, entry: Entry, cell: Cell) -> np.dtype:
        """Dtype that a cell is written in when it stays float: its own, or bfloat16 where it was decoded."""
        return self.stored_dtype(cell) or np.dtype(np.float32 if entry.float32 else ml_dtypes.bfloat16)


def _tensor_index(entry: Entry, cell: Cell, index: Index) -> Index:
    """Where a part of a cell lies in its tensor: `View`, as slices."""
    view, parts = entry.view, list(index)
    if view.parts > 1:
        rows = entry.row_axis
        size = cell_shape(entry)[rows]
        chosen = range(*parts[rows].indices(size))
        if view.interleaved:
            first, step = view.start + chosen[0] * view.parts, chosen.step * view.parts
        else:
            first, step = view.start * size + chosen[0], chosen.step
        parts[rows] = slice(first, first + (len(chosen) - 1) * step + 1, step)
    if view.transposed:
        parts[-2:] = parts[:-3:-1]
    if cell.row is not None:
        parts.insert(0, slice(cell.row, cell.row + 1))
    if view.unit_axis:
        parts.insert(0, slice(0, 1))
    return tuple(parts)
