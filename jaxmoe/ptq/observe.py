"""The first pass of a calibrated quantisation: the float model runs layer by layer, each layer's treatment is kept.

What is kept a layer is small (exponents and mean squares of channels) and on disk, so that the second pass, which
rounds every matrix on its own, needs neither the samples nor the layers' order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.errors import WeightsError
from jaxmoe.models.manifest import Entry, Manifest, stack_of_layer
from jaxmoe.ptq.layer_run import LayerRunner, embed_samples, load_layer
from jaxmoe.ptq.smooth import Treatment, treatments
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.cells import Cell, Source

Progress = Callable[[int, int], None]
_FIELDS = ("rows", "columns", "importance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the first pass saw."""

    tokens: int
    """Calibration tokens in all."""
    counts: np.ndarray
    """[moe_layers, experts] int64: tokens that each expert was given."""


def observe(
    source: Source,
    manifest: Manifest,
    schemes: Mapping[str, Scheme | None],
    *,
    token_ids: np.ndarray,
    lengths: Sequence[int],
    alpha: float | None,
    folder: Path,
    devices: Sequence[Any],
    progress: Progress | None = None,
) -> Observed:
    """Runs the calibration samples through all layers and writes one file of treatments a layer.

    Args:
        source: the float checkpoint.
        manifest: the model.
        schemes: what will be rounded, by parameter path.
        token_ids: [samples, width] int32.
        lengths: tokens of each sample.
        alpha: of smoothing; None: none.
        folder: where the files go; made if absent.
        devices: that run samples; any number gives the same files.
        progress: called after each layer.

    Raises:
        WeightsError: a layer's output is not finite.
    """
    config = manifest.config
    folder.mkdir(parents=True, exist_ok=True)
    samples = list(embed_samples(source, manifest, token_ids, lengths))
    counts = []
    for layer in range(config.layers):
        weights = load_layer(source, manifest, layer)
        runner = LayerRunner(config, layer, weights, token_ids.shape[1], devices)
        samples, observation, tokens = runner.run(samples)
        if not all(np.isfinite(sample.x[: sample.length]).all() for sample in samples):
            raise WeightsError(f"layer {layer} of the float model gives NaN or infinite values on the calibration text")
        stack, _ = stack_of_layer(config, layer)
        quantized = frozenset(
            name for name in weights if schemes.get(name if name.startswith("indexer.") else f"{stack}.{name}")
        )
        _write(_layer_file(folder, layer), treatments(config, weights, observation, quantized, alpha))
        if tokens is not None:
            counts.append(tokens)
        if progress is not None:
            progress(layer + 1, config.layers)
    return Observed(tokens=int(sum(lengths)), counts=np.stack(counts))


def _layer_file(folder: Path, layer: int) -> Path:
    return folder / f"layer_{layer:05}.npz"


def _write(path: Path, plan: Mapping[str, Treatment]) -> None:
    arrays = {
        f"{name}|{field}": getattr(treatment, field)
        for name, treatment in plan.items()
        for field in _FIELDS
        if getattr(treatment, field) is not None
    }
    with path.open("wb") as stream:
        np.savez(stream, **arrays)


class TreatmentStore:
    """The treatments of a first pass; holds one layer's at a time."""

    def __init__(self, folder: Path, manifest: Manifest):
        """Args: folder: written by `observe`; manifest: the model."""
        self._folder, self._manifest = folder, manifest
        self._layer: int | None = None
        self._arrays: dict[str, np.ndarray] = {}

    def get(self, entry: Entry, position: int) -> Treatment:
        """The treatment of a parameter at a place of its stack; nothing for what is in no layer or has none."""
        layer, name = self._place(entry, position)
        if layer is None:
            return Treatment()
        if layer != self._layer:
            with np.load(_layer_file(self._folder, layer)) as stored:
                self._arrays = dict(stored)
            self._layer = layer
        return Treatment(**{field: self._arrays.get(f"{name}|{field}") for field in _FIELDS})

    def _place(self, entry: Entry, position: int) -> tuple[int | None, str]:
        """Number of the layer and the path within its block."""
        stack, _, rest = entry.path.partition(".")
        if stack in ("dense", "moe"):
            return entry.layers[position], rest
        return (entry.layers[position], entry.path) if stack == "indexer" else (None, entry.path)


def scale_weight(weight: np.ndarray, treatment: Treatment, cell: tuple[int, ...]) -> np.ndarray:
    """A cell's weight [out, in] or vector [width] in float32 with its exponents applied: exact.

    Args:
        weight: as the source has it.
        treatment: of its parameter.
        cell: its place on the parameter's axes after the layer: (), or (expert,).
    """
    scaled = weight.astype(np.float32)
    if treatment.rows is not None:
        rows = np.exp2(treatment.rows[cell].astype(np.float32))
        scaled = scaled * (rows if weight.ndim == 1 else rows[:, None])
    if treatment.columns is not None:
        scaled = scaled * np.exp2(treatment.columns[cell].astype(np.float32))[None, :]
    return scaled


def scale_rows(array: np.ndarray, treatment: Treatment, cell: Cell, start: int, dtype: np.dtype) -> np.ndarray:
    """Rows `start`.. of a cell that stays float, with its exponents, in its dtype.

    Raises:
        WeightsError: the dtype cannot hold what smoothing makes of a value.
    """
    if treatment.rows is None and treatment.columns is None:
        return array.astype(dtype, copy=False)
    place = cell.position[1:]
    rows = None if treatment.rows is None else treatment.rows[place][start : start + len(array)]
    part = Treatment(rows=rows, columns=None if treatment.columns is None else treatment.columns[place])
    exact = scale_weight(array, part, ())
    result = exact.astype(dtype)
    if not np.array_equal(result.astype(np.float32), exact):
        raise WeightsError(f"{cell.label}: {dtype} cannot hold its values after smoothing; use a smaller alpha")
    return result


def importance_of(treatment: Treatment, cell: tuple[int, ...], width: int) -> np.ndarray:
    """[width] float32 weights of a cell's input channels, scaled to a mean of one; ones where nothing is known."""
    if treatment.importance is None:
        return np.ones(width, np.float32)
    own = treatment.importance[cell]
    mean = float(own.mean(dtype=np.float64))
    if not (math.isfinite(mean) and mean > 0):
        return np.ones(width, np.float32)
    # A channel that calibration never saw still has to be stored: a thousandth of the mean keeps it in play.
    return np.maximum(own / np.float32(mean), np.float32(1e-3)).astype(np.float32)
