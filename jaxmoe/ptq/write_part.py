"""Reads, treats, rounds and writes the cells of one parameter: the end of every quantisation."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.ptq.job import CHUNK_ELEMENTS, FLOAT32, Job, Part
from jaxmoe.ptq.report import TensorReport
from jaxmoe.ptq.rounding import Options, round_weight
from jaxmoe.ptq.rounding.gptq import NEAREST
from jaxmoe.ptq.smooth import Treatment, scale_weight
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.cells import Cell, cell_shape
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.shards import ShardFiles

Moments = Callable[[tuple[int, ...]], np.ndarray | None]
"""The second moment that the cell at a position is rounded by, as `round_weight` wants it; None: all inputs alike."""


def no_moment(_: tuple[int, ...]) -> None:
    """Nothing is known."""


def write_part(
    job: Job, shards: ShardFiles, part: Part, *, treatment: Treatment, moments: Moments, device: Any
) -> list[TensorReport]:
    """Writes a parameter's cells: rounded, or as they are.

    Args:
        job: the quantisation.
        shards: where the result goes.
        part: which cells.
        treatment: of all of them.
        moments: of each.
        device: that rounds.

    Raises:
        WeightsError: a source tensor is not finite, cannot be held after smoothing, or the disk fails.
    """
    if part.match.scheme is None:
        for hub, own in part.cells:
            _keep(job, shards, part, hub, own, treatment)
        return []
    step = part.cells_at_once
    chunks = [part.cells[start : start + step] for start in range(0, len(part.cells), step)]
    return [r for chunk in chunks for r in _round_chunk(job, shards, part, chunk, treatment, moments, device)]


def _round_chunk(
    job: Job,
    shards: ShardFiles,
    part: Part,
    cells: Sequence[tuple[Cell, Cell]],
    treatment: Treatment,
    moments: Moments,
    device: Any,
) -> Iterator[TensorReport]:
    entry = part.match.entry
    shape = cell_shape(entry)
    whole = tuple(slice(0, size) for size in shape)
    weights = np.empty((len(cells), *shape), job.read_dtype(part) if treatment.is_empty else FLOAT32)
    for index, (hub, _) in enumerate(cells):
        read = job.source.read(entry, hub, whole)
        weights[index] = read if treatment.is_empty else scale_weight(read, treatment)
    known = [moments(hub.position) for hub, _ in cells]
    moment = None if any(each is None for each in known) else np.stack([np.asarray(each) for each in known])
    yield from round_cells(job, shards, part, cells, weights, moment, device)


def round_cells(
    job: Job,
    shards: ShardFiles,
    part: Part,
    cells: Sequence[tuple[Cell, Cell]],
    weights: np.ndarray,
    moment: np.ndarray | None,
    device: Any,
) -> Iterator[TensorReport]:
    """Rounds weights that were read and treated, and writes them.

    Args:
        job: the quantisation.
        shards: where the result goes.
        part: the parameter.
        cells: which of its cells.
        weights: [cells, out, in] float.
        moment: [cells, in] or [cells, in, in] float32; None: all inputs alike.
        device: that rounds.
    """
    scheme = part.match.scheme
    assert scheme is not None, part.name
    placed = jax.device_put((weights, moment), device)
    rounded = _round(*placed, scheme, part.match.options)
    values, scales, signal, noise, zero_groups, status = map(np.asarray, rounded)
    for index, (hub, own) in enumerate(cells):
        yield TensorReport.checked(
            name=own.label,
            source=hub.label,
            role=part.match.entry.role,
            scheme=scheme,
            signal=float(signal[index]),
            noise=float(noise[index]),
            zero_groups=int(zero_groups[index]),
            to_nearest=int(status[index]) == NEAREST,
        )
        for name, array in job.output.tensors(own.tensor, values[index], scales[index], scheme).items():
            if own.row is None:
                shards.write(name, array)
            else:
                shards.write_rows(name, own.row, array[None])


@partial(jax.jit, static_argnums=(2, 3))
def _round(weights: jax.Array, moment: jax.Array | None, scheme: Scheme, options: Options) -> tuple[jax.Array, ...]:
    """[count, out, in] -> integers, scales, and per tensor: sums of squares and of errors, all-zero groups, status."""
    weights = weights.astype(jnp.float32)
    array, status = round_weight(weights, moment, scheme, options)
    error = array.dequantize() - weights
    size, group = weights.shape[-1], array.group
    pad = [(0, 0)] * (weights.ndim - 1) + [(0, -size % group)]
    integers = array.integers()
    groups = jnp.pad(integers, pad).reshape(*weights.shape[:-1], -1, group)
    zero_groups = jnp.sum(~jnp.any(groups != 0, axis=-1), axis=(1, 2))
    return (
        integers,
        array.scale,
        jnp.sum(jnp.square(weights), axis=(1, 2)),
        jnp.sum(jnp.square(error), axis=(1, 2)),
        zero_groups,
        status,
    )


def _keep(job: Job, shards: ShardFiles, part: Part, hub: Cell, own: Cell, treatment: Treatment) -> None:
    """Copies a cell that stays float, in pieces if it is a large table."""
    entry = part.match.entry
    dtype = job.source.kept_dtype(entry, hub)
    shape = cell_shape(entry)
    rest = tuple(slice(0, size) for size in shape[1:])
    step = max(1, CHUNK_ELEMENTS // math.prod(shape[1:])) if own.row is None else shape[0]
    for start in range(0, shape[0], step):
        array = job.source.read(entry, hub, (slice(start, min(start + step, shape[0])), *rest))
        if not np.isfinite(array).all():
            raise WeightsError(f"{hub.label}: the source holds NaN or infinite values; they would stay in the result")
        array = scale_rows(array, treatment, start, dtype, hub.label)
        if own.row is None:
            shards.write_rows(own.tensor, start, array)
        else:
            shards.write_rows(own.tensor, own.row, array[None])


def scale_rows(array: np.ndarray, treatment: Treatment, start: int, dtype: np.dtype, where: str) -> np.ndarray:
    """Rows `start`.. of a cell that stays float, with its exponents, in its dtype.

    Raises:
        WeightsError: the dtype cannot hold what smoothing makes of a value.
    """
    if treatment.is_empty:
        return array.astype(dtype, copy=False)
    rows = None if treatment.rows is None else treatment.rows[start : start + len(array)]
    exact = scale_weight(array, Treatment(rows=rows, columns=treatment.columns))
    result = exact.astype(dtype)
    if not np.array_equal(result.astype(np.float32), exact):
        raise WeightsError(f"{where}: {dtype} cannot hold its values after smoothing; use a smaller alpha")
    return result


def copy_tensor(job: Job, meta: TensorMeta, shards: ShardFiles) -> None:
    """A tensor that no parameter needs, byte for byte."""
    if not meta.shape or not meta.nbytes:
        shards.write(meta.name, job.files.checkpoint.read(meta.name))
        return
    step = max(1, CHUNK_ELEMENTS * meta.shape[0] // meta.nbytes)
    for start in range(0, meta.shape[0], step):
        part = slice(start, min(start + step, meta.shape[0]))
        shards.write_rows(meta.name, start, job.files.checkpoint.read(meta.name, (part,)))
