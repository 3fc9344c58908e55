"""Sequences in a paged cache for the tests of the operators that read it: page tables, random tables, poison."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.ops.pages import NULL_PAGE, Table

LAYERS, LAYER = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Where the tokens of some sequences lie; the newest `chunk` of each are queries."""

    page_table: np.ndarray
    """[rows, table_width] int32."""
    positions: np.ndarray
    """[rows, chunk] int32, -1 for padding."""
    written: np.ndarray
    """[pages, page] bool: slots that hold a token."""


def paging(
    lengths: Seq[int], generator: np.random.Generator, *, chunk: int, page_size: int, spare_entries: int = 2
) -> Paging:
    """Pages in random order, a free page beside them, and page table entries beyond the longest sequence."""
    needs = [-(-length // page_size) for length in lengths]
    num_pages = 1 + sum(needs) + 1
    order = iter(generator.permutation(np.arange(1, num_pages)).tolist())
    table = np.full((len(lengths), max(needs) + spare_entries), NULL_PAGE, np.int32)
    positions = np.full((len(lengths), chunk), -1, np.int32)
    written = np.zeros((num_pages, page_size), bool)
    for row, (length, need) in enumerate(zip(lengths, needs, strict=True)):
        table[row, :need] = [next(order) for _ in range(need)]
        count = min(length, chunk)
        positions[row, :count] = np.arange(length - count, length)
        for position in range(length):
            written[slot_of(table, row, position, page_size)] = True
    return Paging(page_table=table, positions=positions, written=written)


def slot_of(page_table: np.ndarray, row: int, position: int, page_size: int) -> tuple[int, int]:
    """Page and slot of a token."""
    return int(page_table[row, position // page_size]), position % page_size


def random_table(generator: np.random.Generator, written: np.ndarray, heads: int, width: int, kind: str) -> Table:
    """Vectors of size 1 in the written slots of all layers, zero in the others."""
    shape = (LAYERS, *written.shape, heads, width)
    mask = written[None, :, :, None]
    if kind == "int8":
        data = generator.integers(-127, 128, size=shape).astype(np.int8) * mask[..., None]
        return Table(data=data, scale=generator.uniform(0.005, 0.03, size=shape[:-1]).astype(np.float32) * mask)
    return Table(data=generator.normal(size=shape).astype(kind) * mask[..., None], scale=None)


def dequantized(table: Table) -> np.ndarray:
    """[pages, page, heads, width] float64 of layer LAYER."""
    wide = np.asarray(table.data[LAYER]).astype(np.float64)
    return wide if table.scale is None else wide * np.asarray(table.scale[LAYER]).astype(np.float64)[..., None]


def poisoned(table: Table, where: np.ndarray) -> Table:
    """The table with NaN in the slots `where` [pages, page]: data 127 and scale NaN, or data NaN."""
    assert where.any(), "nothing to poison"

    def fill(array: np.ndarray, value: float) -> np.ndarray:
        array = array.copy()
        array[:, where] = value
        return array

    if table.scale is None:
        return Table(data=fill(table.data, np.nan), scale=None)
    return Table(data=fill(table.data, 127), scale=fill(table.scale, np.nan))


def chunks(tokens: int, bucket: int) -> list[tuple[np.ndarray, int]]:
    """(positions, padding) of each step that takes `bucket` tokens."""
    steps = [np.arange(start, min(start + bucket, tokens)) for start in range(0, tokens, bucket)]
    return [(span, bucket - len(span)) for span in steps]


def padded(array: np.ndarray, padding: int, fill: Any = 0) -> np.ndarray:
    """The array with `padding` more entries along its first axis."""
    return np.pad(array, ((0, padding), *((0, 0),) * (array.ndim - 1)), constant_values=fill)
