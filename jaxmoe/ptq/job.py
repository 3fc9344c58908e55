"""A checked quantisation: what becomes of every tensor, to how many bytes. Nothing is read but headers.

A source in FP8, MXFP8, INT4 or MXFP4 is decoded on the way. What stays float is copied, or written as it was decoded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.models.manifest import Entry
from jaxmoe.ptq.export.native import Native
from jaxmoe.ptq.export.output import OutputFormat
from jaxmoe.ptq.layer_run import local_name
from jaxmoe.ptq.moments import tap_of
from jaxmoe.ptq.recipe import Match, Recipe, match_recipe
from jaxmoe.ptq.rotation.source import RotatedFiles, RotatedSource, rotate_files
from jaxmoe.ptq.rounding import Needs, method_of
from jaxmoe.ptq.rounding.ssz import SszOptions
from jaxmoe.weights.cells import Cell, Source, cell_shape, hub_cells, own_cells
from jaxmoe.weights.formats import QuantizationConfig, method_name
from jaxmoe.weights.header import TensorMeta
from jaxmoe.weights.layout import TensorSpec
from jaxmoe.weights.load import ModelFiles, open_model

FLOAT32 = np.dtype(np.float32)
CHUNK_ELEMENTS = 1 << 25
"""Elements that are read and rounded at a time, or one matrix if that is larger."""
NATIVE = Native()
_ROUND_BYTES = 14
"""Bytes an element while a chunk is rounded, beside what was read: float32 weights, groups, errors, and the integers.
Measured: each further element of a chunk costs 12 to 15 bytes in all, compiled programs 250 MiB at any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One parameter of one layer, or some of its experts."""

    match: Match
    layer: int
    """Number of the layer; -1: of none."""
    cells: tuple[tuple[Cell, Cell], ...]
    """Each cell, where the source has it and where the result will have it."""

    @property
    def name(self) -> str:
        """The parameter's name within its layer."""
        return local_name(self.match.entry.path)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensors of the result that it has a part in, before the suffixes of a scheme."""
        return tuple(dict.fromkeys(own.tensor for _, own in self.cells))

    def specs(self, job: "Job") -> Iterator[TensorSpec]:
        """The tensors that it becomes."""
        entry, scheme = self.match.entry, self.match.scheme
        for name, hub in {own.tensor: hub for hub, own in self.cells}.items():
            yield from job.output.specs(name, entry.own_shape, scheme, job.source.kept_dtype(entry, hub))

    def source_bytes(self, job: "Job") -> int:
        """Bytes of the source's tensors; of a tensor that two parameters share, this one's part."""
        tensors, stored = job.files.checkpoint.tensors, job.files.source.stored
        names = {hub.tensor for hub, _ in self.cells}
        parts = (part for name in names for part in stored[name].encoding.parts(name, stored[name].shape))
        return sum(tensors[part.name].nbytes for part in parts) // self.match.entry.view.parts

    def result_bytes(self, job: "Job") -> int:
        """Bytes of the tensors that it becomes."""
        return sum(spec.nbytes for spec in self.specs(job))

    def peak_bytes(self, job: "Job") -> int:
        """What a chunk holds at once while it is written."""
        cell = math.prod(cell_shape(self.match.entry))
        if self.match.scheme is None:
            # The rows, and in another dtype.
            return min(cell, CHUNK_ELEMENTS) * (job.read_dtype(self).itemsize + FLOAT32.itemsize)
        elements = cell * min(len(self.cells), self.cells_at_once)
        return elements * (job.read_dtype(self).itemsize + _ROUND_BYTES) + cell * FLOAT32.itemsize

    @property
    def cells_at_once(self) -> int:
        """Cells that make a chunk."""
        return max(1, CHUNK_ELEMENTS // math.prod(cell_shape(self.match.entry)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked quantisation, nothing read yet but headers."""

    files: ModelFiles
    source: Source | RotatedSource
    """What is read: the files' own source, or a rotated view of it."""
    rotated: RotatedFiles | None
    """How the model turns; None: not at all."""
    recipe: Recipe
    matches: tuple[Match, ...]
    output: OutputFormat
    """How the result is written."""
    notes: tuple[str, ...]
    """What is not done as the recipe says, one sentence each."""
    _parts: list[tuple[Part, ...]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Layer by layer: what has no layer, then each layer's parameters."""
        if not self._parts:
            self._parts.append(tuple(_parts(self.matches)))
        return self._parts[0]

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors of the source."""
        return self.files.tensor_bytes

    @property
    def result_bytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(spec.nbytes for spec in output_specs(self))

    @property
    def not_loaded(self) -> tuple[TensorMeta, ...]:
        """Tensors that no parameter needs: they are copied."""
        return tuple(self.files.checkpoint.tensors[name] for name in self.files.not_loaded)

    def source_tensors(self, layer: int) -> Iterator[TensorMeta]:
        """The source's tensors of all but the routed experts of a layer, in no order; nothing if there is none."""
        stored, tensors = self.files.source.stored, self.files.checkpoint.tensors
        for part in self.parts:
            if part.layer == layer and is_run(part.match.entry) and not is_routed(part.match.entry):
                for name in {hub.tensor for hub, _ in part.cells}:
                    for piece in stored[name].encoding.parts(name, stored[name].shape):
                        yield tensors[piece.name]

    def read_dtype(self, part: Part) -> np.dtype:
        """Dtype of what is read: the source's own, if all cells have the same float."""
        dtypes = {self.source.dtype(part.match.entry, hub) for hub, _ in part.cells}
        return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def prepare(folder: Path, recipe: Recipe, output: OutputFormat = NATIVE) -> Job:
    """Opens the source and matches the recipe; every refusal comes from here, before any work.

    Raises:
        ConfigError, UnsupportedError, WeightsError: see `open_model`; the source has integers already.
        RecipeError: the recipe does not fit, or a scheme cannot store a tensor of its shape.
    """
    return make_job(open_model(folder), recipe, output)


def make_job(files: ModelFiles, recipe: Recipe, output: OutputFormat = NATIVE) -> Job:
    """`prepare` of an opened source.

    Raises:
        ConfigError: the source has integers already.
        RecipeError: the recipe does not fit the model, or its schemes the output format.
    """
    own = isinstance(files.quantization, QuantizationConfig)
    if own or any(scheme is not None for scheme in files.schemes.values()):
        raise ConfigError(
            f"{files.folder} is quantised already ({method_name(files.quantization)}): its weights are integers; give "
            "the checkpoint that it was made from (floats, or FP8, MXFP8, INT4 or MXFP4, which are decoded)"
        )
    rotated = None if recipe.rotation is None else rotate_files(files, recipe.rotation)
    files = files if rotated is None else rotated.files
    asked = match_recipe(recipe, files.manifest)
    matches = tuple(_without_data(match) for match in asked)
    _check_needs(recipe, matches)
    output.check(matches)
    return Job(
        files=files,
        source=files.source if rotated is None else rotated.source,
        rotated=rotated,
        recipe=recipe,
        matches=matches,
        output=output,
        notes=(*_mtp_notes(asked, matches), *_cache_notes(recipe, output)),
    )


def _mtp_notes(asked: Sequence[Match], done: Sequence[Match]) -> Iterator[str]:
    for match, instead in zip(asked, done, strict=True):
        if match is not instead:
            yield (
                f"{match.entry.own}: multi-token-prediction blocks are not run on samples, so that it is rounded by "
                f"{instead.rounding} instead of {match.rounding}"
            )


def _cache_notes(recipe: Recipe, output: OutputFormat) -> Iterator[str]:
    if recipe.kv_cache == "int8" and not output.int8_cache:
        yield (
            f"kv_cache: output format {output.name} cannot say that keys and values are stored as int8: the engine "
            f"that serves the result decides it; choose output format {NATIVE.name} to keep it"
        )


def needs_of(match: Match) -> Needs:
    """What the rounding of a parameter wants to know about its inputs."""
    return "nothing" if match.scheme is None else method_of(match.options).needs


def _without_data(match: Match) -> Match:
    """Multi-token-prediction blocks are not run on samples: what needs the products of inputs becomes ssz there."""
    if needs_of(match) != "hessian" or not match.entry.path.startswith("mtp."):
        return match
    return replace(match, rounding="ssz", options=SszOptions())


def is_run(entry: Entry) -> bool:
    """Whether a parameter is a part of a layer that calibration runs; multi-token-prediction blocks are not run."""
    return entry.path.partition(".")[0] in ("dense", "moe", "indexer")


def is_routed(entry: Entry) -> bool:
    """Whether a parameter is a part of the routed experts of a layer that calibration runs."""
    return "experts" in entry.axes and entry.path.partition(".")[0] == "moe"


def tap_of_match(match: Match, matches: Sequence[Match]) -> str | None:
    """The tap that a parameter reads, if it is in a layer that calibration runs and not a routed expert's."""
    entry = match.entry
    if not is_run(entry) or "experts" in entry.axes:
        return None
    compressed = any(local_name(other.entry.path) == "attention.q_a" for other in matches)
    return tap_of(local_name(entry.path), compressed_queries=compressed)


def _check_needs(recipe: Recipe, matches: Sequence[Match]) -> None:
    """Refuses a rounding that needs the second moments of inputs that the calibration does not see."""
    for match in matches:
        if needs_of(match) == "hessian" and not is_routed(match.entry) and tap_of_match(match, matches) is None:
            raise RecipeError(
                f"recipe {recipe.name}: rule {match.rule + 1} rounds {match.entry.role} of {match.entry.path} with "
                f"{match.rounding}, which needs the products of its inputs, and calibration does not see those; use "
                "ssz or nearest there"
            )


def gram_taps(job: Job) -> frozenset[str]:
    """Taps whose Gram matrices some rounding needs; of routed experts the prior, which is the layer's input."""
    taps = set()
    for match in job.matches:
        if needs_of(match) == "hessian":
            tap = "ffn.in" if is_routed(match.entry) else tap_of_match(match, job.matches)
            assert tap is not None, match.entry.path
            taps.add(tap)
    return frozenset(taps)


def output_specs(job: Job) -> list[TensorSpec]:
    """Every tensor of the result in the order of the files."""
    specs = [spec for part in job.parts for spec in part.specs(job)]
    return specs + [TensorSpec(name=meta.name, dtype=meta.dtype, shape=meta.shape) for meta in job.not_loaded]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedRow:
    """One role of the matched table."""

    role: str
    rule: int
    scheme: str
    rounding: str
    tensors: int
    source_bytes: int
    result_bytes: int


def matched_table(job: Job) -> list[MatchedRow]:
    """What the recipe does with every role, and to how many bytes."""
    rows: dict[tuple[str, int, str, str], list[int]] = {}
    for part in job.parts:
        match = part.match
        scheme = "float" if match.scheme is None else match.scheme.name
        rounding = "" if match.scheme is None else match.rounding
        counts = rows.setdefault((match.entry.role, match.rule, scheme, rounding), [0, 0, 0])
        counts[0] += len(part.tensors)
        counts[1] += part.source_bytes(job)
        counts[2] += part.result_bytes(job)
    if job.files.not_loaded:
        size = sum(meta.nbytes for meta in job.not_loaded)
        rows["(not loaded, copied)", -1, "float", ""] = [len(job.files.not_loaded), size, size]
    return [
        MatchedRow(
            role=role,
            rule=rule,
            scheme=scheme,
            rounding=rounding,
            tensors=tensors,
            source_bytes=before,
            result_bytes=after,
        )
        for (role, rule, scheme, rounding), (tensors, before, after) in sorted(
            rows.items(), key=lambda item: (item[0][1], item[0][0])
        )
    ]


def _parts(matches: Sequence[Match]) -> Iterator[Part]:
    by_layer: dict[int, list[Part]] = {}
    for match in matches:
        entry = match.entry
        cells: dict[int, list[tuple[Cell, Cell]]] = {}
        for hub, own in zip(hub_cells(entry), own_cells(entry), strict=True):
            layer = entry.layers[hub.position[0]] if hub.position else -1
            cells.setdefault(layer, []).append((hub, own))
        for layer, pairs in cells.items():
            by_layer.setdefault(layer, []).append(Part(match=match, layer=layer, cells=tuple(pairs)))
    for layer in sorted(by_layer):
        yield from by_layer[layer]
