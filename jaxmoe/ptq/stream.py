"""Quantises a checkpoint layer by layer: read, round, write, free. Peak host memory is a few experts of one projection.

A source in FP8, MXFP8, INT4 or MXFP4 is decoded on the way. What stays float is copied, or written as it was decoded.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError, RecipeError, WeightsError
from jaxmoe.models.leaves import scale_name
from jaxmoe.models.manifest import Entry
from jaxmoe.ptq.observe import TreatmentStore, importance_of, scale_rows, scale_weight
from jaxmoe.ptq.recipe import Match, Recipe, Rounding, match_recipe, schemes_of_matches
from jaxmoe.ptq.report import TensorReport, build_report
from jaxmoe.ptq.rounding import NearestOptions, method_of, round_weight
from jaxmoe.ptq.rounding.ssz import SszOptions
from jaxmoe.ptq.smooth import Treatment
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.cells import Cell, cell_shape, hub_cells, own_cells
from jaxmoe.weights.encodings import Plain, values_name
from jaxmoe.weights.foreign import SIDE_FILES
from jaxmoe.weights.formats import QuantizationConfig, describe, method_name, without_quantization
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.load import ModelFiles, open_model
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec, write_text_atomic

_BFLOAT16, _FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
_CHUNK_ELEMENTS = 1 << 25
"""Elements that are read and rounded at a time, or one matrix if that is larger."""
_ROUND_BYTES = 14
"""Bytes an element while a chunk is rounded, beside what was read: float32 weights, groups, errors, and the integers.
Measured: each further element of a chunk costs 12 to 15 bytes in all, compiled programs 250 MiB at any size."""
Progress = Callable[[int, int], None]
"""Called with (stages done, stages in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked quantisation, nothing read yet but headers."""

    files: ModelFiles
    recipe: Recipe
    matches: tuple[Match, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return self.files.tensor_bytes

    @property
    def result_bytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(spec.nbytes for spec in output_specs(self))

    @property
    def peak_bytes(self) -> int:
        """Host memory of the widest moment, beside the interpreter, JAX and compiled programs."""
        copied = max((min(meta.nbytes, _CHUNK_ELEMENTS) for meta in self._not_loaded()), default=0)
        return max([copied, *(stage.peak_bytes(self) for stage in _stages(self))])

    def _not_loaded(self) -> Iterator[TensorMeta]:
        return (self.files.checkpoint.tensors[name] for name in self.files.not_loaded)


def prepare(folder: Path, recipe: Recipe) -> Job:
    """Opens the source and matches the recipe; every refusal comes from here, before any work.

    Raises:
        ConfigError, UnsupportedError, WeightsError: see `open_model`; the source has integers already.
        RecipeError: the recipe does not fit, or a scheme cannot store a tensor of its shape.
    """
    return make_job(open_model(folder), recipe)


def make_job(files: ModelFiles, recipe: Recipe) -> Job:
    """`prepare` of an opened source.

    Raises:
        ConfigError: the source has integers already.
        RecipeError: the recipe does not fit.
    """
    own = isinstance(files.quantization, QuantizationConfig)
    if own or any(scheme is not None for scheme in files.schemes.values()):
        raise ConfigError(
            f"{files.folder} is quantised already ({method_name(files.quantization)}): its weights are integers; give "
            "the checkpoint that it was made from (floats, or FP8, MXFP8, INT4 or MXFP4, which are decoded)"
        )
    return Job(files=files, recipe=recipe, matches=match_recipe(recipe, files.manifest))


def output_specs(job: Job) -> list[TensorSpec]:
    """Every tensor of the result in the order of writing."""
    specs = [spec for stage in _stages(job) for spec in stage.specs(job)]
    return specs + [TensorSpec(name=meta.name, dtype=meta.dtype, shape=meta.shape) for meta in job._not_loaded()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedRow:
    """One role of the matched table."""

    role: str
    rule: int
    scheme: str
    tensors: int
    source_bytes: int
    result_bytes: int


def matched_table(job: Job) -> list[MatchedRow]:
    """What the recipe does with every role, and to how many bytes."""
    rows: dict[tuple[str, int, str], list[int]] = {}
    for stage in _stages(job):
        match = stage.match
        key = (match.entry.role, match.rule, "float" if match.scheme is None else match.scheme.name)
        counts = rows.setdefault(key, [0, 0, 0])
        counts[0] += len({own.tensor for _, own in stage.cells})
        counts[1] += stage.source_bytes(job)
        counts[2] += sum(spec.nbytes for spec in stage.specs(job))
    if job.files.not_loaded:
        size = sum(meta.nbytes for meta in job._not_loaded())
        rows["(not loaded, copied)", -1, "float"] = [len(job.files.not_loaded), size, size]
    return [
        MatchedRow(role=role, rule=rule, scheme=scheme, tensors=tensors, source_bytes=before, result_bytes=after)
        for (role, rule, scheme), (tensors, before, after) in sorted(
            rows.items(), key=lambda item: (item[0][1], item[0][0])
        )
    ]


def quantize(
    job: Job,
    out: Path,
    progress: Progress | None = None,
    *,
    treatments: TreatmentStore | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Writes the quantised checkpoint folder.

    With treatments (of `observe`), weights are smoothed before they are rounded, and rules that ask for it round by
    the importance of channels; `calibration` is what the report says of their data.

    All is written into `<out>.partial`, each shard fsynced and renamed, and the folder renamed at the end: what has the
    final name is complete.

    Raises:
        ConfigError: `out` exists and is not an empty folder.
        RecipeError: the recipe is calibrated and there are no treatments.
        WeightsError: a source tensor is not finite or changed under our hands.
    """
    check_output(out)
    if job.recipe.calibration is not None and treatments is None:
        raise RecipeError(f"recipe {job.recipe.name} is calibrated: it needs the treatments of a first pass")
    partial_folder = out.with_name(f"{out.name}.partial")
    if partial_folder.exists():
        shutil.rmtree(partial_folder)
    partial_folder.mkdir(parents=True)
    stages = list(_stages(job))
    total = len(stages) + len(job.files.not_loaded)
    reports: list[TensorReport] = []
    with CheckpointWriter(partial_folder, output_specs(job), metadata={"format": "pt"}) as writer:
        for done, stage in enumerate(stages):
            reports.extend(stage.run(job, writer, treatments))
            if progress is not None:
                progress(done + 1, total)
        for done, meta in enumerate(job._not_loaded(), start=len(stages)):
            _copy(job, meta, writer)
            if progress is not None:
                progress(done + 1, total)
    _copy_side_files(job.files.folder, partial_folder)
    config = without_quantization(read_json(job.files.folder / "config.json"))
    schemes = schemes_of_matches(job.matches)
    config["quantization_config"] = describe(schemes, job.files.manifest, job.recipe.kv_cache)
    report = build_report(
        source=job.files,
        recipe=job.recipe,
        tensors=reports,
        source_bytes=job.source_bytes,
        result_bytes=job.result_bytes,
        calibration=calibration,
    )
    write_text_atomic(partial_folder / "jaxmoe_report.json", json.dumps(report, indent=2) + "\n")
    write_text_atomic(partial_folder / "config.json", json.dumps(config, indent=2) + "\n")
    if out.exists():
        out.rmdir()
    partial_folder.rename(out)


def check_output(out: Path) -> None:
    """Refuses to write over something.

    Raises:
        ConfigError: `out` is a file or a folder with something in it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already and is not an empty folder; remove it or choose another name")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One parameter of one layer: all its experts."""

    match: Match
    cells: tuple[tuple[Cell, Cell], ...]
    """Each cell, where the source has it and where the result will have it."""

    def specs(self, job: Job) -> Iterator[TensorSpec]:
        entry, scheme = self.match.entry, self.match.scheme
        for name, hub in {own.tensor: hub for hub, own in self.cells}.items():
            if scheme is None:
                yield TensorSpec(name=name, dtype=_kept_dtype(job, entry, hub), shape=entry.own_shape)
            else:
                shape = scheme.values_shape(entry.own_shape)
                yield TensorSpec(name=values_name(name, scheme), dtype=scheme.values_dtype, shape=shape)
                yield TensorSpec(name=scale_name(name), dtype=_FLOAT32, shape=scheme.scales_shape(entry.own_shape))

    def source_bytes(self, job: Job) -> int:
        """Bytes of the source's tensors; of a tensor that two parameters share, this one's part."""
        tensors, stored = job.files.checkpoint.tensors, job.files.source.stored
        names = {hub.tensor for hub, _ in self.cells}
        parts = (part for name in names for part in stored[name].encoding.parts(name, stored[name].shape))
        return sum(tensors[part.name].nbytes for part in parts) // self.match.entry.view.parts

    def peak_bytes(self, job: Job) -> int:
        """What a chunk holds at once, see `run`."""
        cell = math.prod(cell_shape(self.match.entry))
        if self.match.scheme is None:
            # The rows, and in another dtype.
            return min(cell, _CHUNK_ELEMENTS) * (self._read_dtype(job).itemsize + _FLOAT32.itemsize)
        elements = cell * min(len(self.cells), self._cells_at_once())
        return elements * (self._read_dtype(job).itemsize + _ROUND_BYTES) + cell * _FLOAT32.itemsize

    def run(self, job: Job, writer: CheckpointWriter, treatments: TreatmentStore | None) -> list[TensorReport]:
        position = self.cells[0][0].position
        treatment = Treatment()
        if treatments is not None and position:
            treatment = treatments.get(self.match.entry, position[0])
        if self.match.scheme is None:
            for hub, own in self.cells:
                self._keep(job, writer, hub, own, treatment)
            return []
        step = self._cells_at_once()
        return [
            report
            for start in range(0, len(self.cells), step)
            for report in self._round(job, writer, self.cells[start : start + step], self.match.scheme, treatment)
        ]

    def _round(
        self,
        job: Job,
        writer: CheckpointWriter,
        cells: tuple[tuple[Cell, Cell], ...],
        scheme: Scheme,
        treatment: Treatment,
    ) -> Iterator[TensorReport]:
        entry = self.match.entry
        shape = cell_shape(entry)
        whole = tuple(slice(0, size) for size in shape)
        plain = treatment.is_empty
        weights = np.empty((len(cells), *shape), self._read_dtype(job) if plain else _FLOAT32)
        importance = np.empty((len(cells), shape[-1]), np.float32)
        for index, (hub, _) in enumerate(cells):
            read = job.files.source.read(entry, hub, whole)
            weights[index] = read if plain else scale_weight(read, treatment, hub.position[1:])
            importance[index] = importance_of(treatment, hub.position[1:], shape[-1])
        rounded = _round(weights, importance, scheme, self.match.rounding)
        values, scales, signal, noise, zero_groups = map(np.asarray, rounded)
        for index, (hub, own) in enumerate(cells):
            yield TensorReport.checked(
                name=own.label,
                source=hub.label,
                role=entry.role,
                scheme=scheme,
                signal=float(signal[index]),
                noise=float(noise[index]),
                zero_groups=int(zero_groups[index]),
            )
            _write_cell(writer, values_name(own.tensor, scheme), own, values[index])
            _write_cell(writer, scale_name(own.tensor), own, scales[index])

    def _keep(self, job: Job, writer: CheckpointWriter, hub: Cell, own: Cell, treatment: Treatment) -> None:
        """Copies a cell that stays float, in pieces if it is a large table."""
        entry = self.match.entry
        dtype = _kept_dtype(job, entry, hub)
        shape = cell_shape(entry)
        rest = tuple(slice(0, size) for size in shape[1:])
        step = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:])) if own.row is None else shape[0]
        for start in range(0, shape[0], step):
            array = job.files.source.read(entry, hub, (slice(start, min(start + step, shape[0])), *rest))
            if not np.isfinite(array).all():
                raise WeightsError(
                    f"{hub.label}: the source holds NaN or infinite values; they would stay in the result"
                )
            array = scale_rows(array, treatment, hub, start, dtype)
            if own.row is None:
                writer.write_rows(own.tensor, start, array)
            else:
                writer.write_rows(own.tensor, own.row, array[None])

    def _cells_at_once(self) -> int:
        return max(1, _CHUNK_ELEMENTS // math.prod(cell_shape(self.match.entry)))

    def _read_dtype(self, job: Job) -> np.dtype:
        """Dtype of what is read: the source's own, if all cells have the same float."""
        dtypes = {_stored_dtype(job, hub) for hub, _ in self.cells}
        only = dtypes.pop() if len(dtypes) == 1 else None
        return _FLOAT32 if only is None else only


@partial(jax.jit, static_argnums=(2, 3))
def _round(weights: jax.Array, importance: jax.Array, scheme: Scheme, rounding: Rounding) -> tuple[jax.Array, ...]:
    """[count, out, in] -> integers, scales, and per tensor: sum of squares, of errors, number of all-zero groups."""
    weights = weights.astype(jnp.float32)
    options = SszOptions() if rounding == "ssz" else NearestOptions()
    array, _ = round_weight(weights, importance if method_of(options).needs == "importance" else None, scheme, options)
    error = array.dequantize() - weights
    size, group = weights.shape[-1], array.group
    pad = [(0, 0)] * (weights.ndim - 1) + [(0, -size % group)]
    groups = jnp.pad(array.integers(), pad).reshape(*weights.shape[:-1], -1, group)
    zero_groups = jnp.sum(~jnp.any(groups != 0, axis=-1), axis=(1, 2))
    return (
        array.qvalue,
        array.scale,
        jnp.sum(jnp.square(weights), axis=(1, 2)),
        jnp.sum(jnp.square(error), axis=(1, 2)),
        zero_groups,
    )


def _stored_dtype(job: Job, cell: Cell) -> np.dtype | None:
    """Dtype of a plain tensor; None: it is decoded."""
    plain = isinstance(job.files.source.stored[cell.tensor].encoding, Plain)
    return job.files.checkpoint.tensors[cell.tensor].dtype if plain else None


def _kept_dtype(job: Job, entry: Entry, cell: Cell) -> np.dtype:
    """Dtype of what stays float: the source's own, or bfloat16 where it was decoded."""
    return _stored_dtype(job, cell) or (_FLOAT32 if entry.float32 else _BFLOAT16)


def _write_cell(writer: CheckpointWriter, tensor: str, own: Cell, array: np.ndarray) -> None:
    if own.row is None:
        writer.write(tensor, array)
    else:
        writer.write_rows(tensor, own.row, array[None])


def _copy(job: Job, meta: TensorMeta, writer: CheckpointWriter) -> None:
    """A tensor that no parameter needs, byte for byte."""
    if not meta.shape or not meta.nbytes:
        writer.write(meta.name, job.files.checkpoint.read(meta.name))
        return
    step = max(1, _CHUNK_ELEMENTS * meta.shape[0] // meta.nbytes)
    for start in range(0, meta.shape[0], step):
        part = slice(start, min(start + step, meta.shape[0]))
        writer.write_rows(meta.name, start, job.files.checkpoint.read(meta.name, (part,)))


def _stages(job: Job) -> Iterator[_Stage]:
    """Layer by layer: what has no layer, then each layer's parameters."""
    by_layer: dict[int, list[_Stage]] = {}
    for match in job.matches:
        entry = match.entry
        cells: dict[int, list[tuple[Cell, Cell]]] = {}
        for hub, own in zip(hub_cells(entry), own_cells(entry), strict=True):
            layer = entry.layers[hub.position[0]] if hub.position else -1
            cells.setdefault(layer, []).append((hub, own))
        for layer, pairs in cells.items():
            by_layer.setdefault(layer, []).append(_Stage(match=match, cells=tuple(pairs)))
    for layer in sorted(by_layer):
        yield from by_layer[layer]


def _copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation config, licence: all but weights and what describes them."""
    for path in sorted(source.iterdir()):
        weights = path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt", ".gguf"))
        if path.is_file() and not weights and path.name not in ("config.json", "jaxmoe_report.json", *SIDE_FILES):
            shutil.copyfile(path, target / path.name)
