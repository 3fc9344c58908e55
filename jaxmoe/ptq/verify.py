"""Checks a finished checkpoint folder against its files, its configuration and the checkpoint that it was made from.

Reads every parameter's tensors, a piece at a time, through the loader's own reader: what passes here loads. Of tensors
that no parameter needs, it sees that they are there.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError, RecipeError, WeightsError
from jaxmoe.models.manifest import Entry
from jaxmoe.ptq.quantize import is_side_file
from jaxmoe.ptq.report import REPORT_NAME
from jaxmoe.ptq.verification import Problem, Verification, role_rows
from jaxmoe.quant.int8 import QMAX, QMAX_OF_4
from jaxmoe.quant.scheme import Scheme, parse_scheme
from jaxmoe.weights.cells import Cell, cell_shape, hub_cells
from jaxmoe.weights.encodings import Plain
from jaxmoe.weights.formats import FLOAT_ROLES, QuantizationConfig, method_name
from jaxmoe.weights.load import ModelFiles, open_model
from jaxmoe.weights.packing import pairs_to_int8
from jaxmoe.weights.safetensors import INDEX_SUFFIX

_CHUNK_ELEMENTS = 1 << 22
LEAST_SQNR_DB = 6.0
"""Half the amplitude is error: 4-bit rounding leaves 15 dB or more, so these are other weights or another layout."""
Progress = Callable[[int, int], None]
"""Called with (parameters done, parameters in all)."""


def verify(
    folder: Path,
    source: Path | None = None,
    *,
    min_sqnr_db: float | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Checks a folder; what is wrong is returned, not raised.

    Args:
        folder: a checkpoint of ours, or of another format that this project reads.
        source: the checkpoint that it was made from.
        min_sqnr_db: least signal-to-noise ratio that a quantised tensor may have; None: `LEAST_SQNR_DB`, where there is
            something to measure it by.
        progress: called after each parameter.

    Raises:
        ConfigError: a folder or its config.json is absent or wrong, or a least ratio without anything to measure it by.
        UnsupportedError: a format or a family that this version cannot read.
        WeightsError: the source is damaged.
    """
    report = _read_report(folder)
    changed = report is not None and changes_weights(report)
    if min_sqnr_db is not None and source is None and report is None:
        raise ConfigError(f"--min-sqnr-db {min_sqnr_db:g}: give --source, or a folder with its {REPORT_NAME}")
    original = None if source is None else open_model(source)
    try:
        files = open_model(folder)
    except WeightsError as error:
        return _unreadable(folder, source, Problem(check="files", where=str(folder), text=str(error)))
    state = _State()
    state.problems += _file_problems(files)
    state.problems += _share_problems(files, report)
    compared = None if original is None else _paired(files, original, state)
    if original is not None:
        state.problems += _source_problems(files, original)
    for done, entry in enumerate(files.manifest.entries, start=1):
        _check_entry(files, entry, None if changed else compared, state)
        if progress is not None:
            progress(done, len(files.manifest.entries))
    measured: Literal["source", "report"] | None = None if compared is None else "source"
    if report is not None and (changed or compared is None):
        measured = "report"
        state.sqnr_db.update((name, tensor["sqnr_db"]) for name, tensor in report_tensors(report).items())
    state.problems += _ratio_problems(state.sqnr_db, LEAST_SQNR_DB if min_sqnr_db is None else min_sqnr_db)
    return _verification(files, source, measured, state)


@dataclass(slots=True, kw_only=True)
class _State:
    """What was found so far."""

    problems: list[Problem] = field(default_factory=list)
    sqnr_db: dict[str, float | None] = field(default_factory=dict)
    """Label of a cell -> ratio; None: no error, or nothing but zeros."""


def changes_weights(report: Mapping[str, Any]) -> bool:
    """Whether a report's recipe changes weights before it rounds them: then the source is no measure of rounding."""
    recipe = report.get("recipe", {})
    return bool((recipe.get("calibration") or {}).get("smooth")) or bool(recipe.get("rotation"))


def _read_report(folder: Path) -> dict[str, Any] | None:
    path = folder / REPORT_NAME
    return read_json(path) if path.exists() else None


def report_tensors(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Name -> what a report says of a quantised tensor.

    Raises:
        ConfigError: the report has another form.
    """
    tensors = report.get("tensors")
    keys = {"name", "scheme", "sqnr_db"}
    if not isinstance(tensors, list) or not all(isinstance(t, Mapping) and keys <= set(t) for t in tensors):
        raise ConfigError(
            f"{REPORT_NAME}: tensors is no list of objects with {', '.join(sorted(keys))}; restore the file"
        )
    return {tensor["name"]: tensor for tensor in tensors}


def _unreadable(folder: Path, source: Path | None, problem: Problem) -> Verification:
    return Verification(
        folder=str(folder),
        method="unknown",
        source=None if source is None else str(source),
        sqnr_of=None,
        rows=(),
        tensors=0,
        nbytes=0,
        quantised_share=0.0,
        problems=(problem,),
    )


def _file_problems(files: ModelFiles) -> Iterator[Problem]:
    """The index's total, and files that are no part of the checkpoint."""
    for index in files.folder.glob(f"*{INDEX_SUFFIX}"):
        stated = read_json(index).get("metadata", {}).get("total_size")
        if stated is not None and stated != files.tensor_bytes:
            text = f"metadata.total_size = {stated}, the tensors have {files.tensor_bytes} bytes"
            yield Problem(check="files", where=index.name, text=text)
    for path in files.checkpoint.unused_files:
        yield Problem(check="files", where=path.name, text="no tensor of the index is in this file; remove it")
    for path in sorted(files.folder.glob("*.tmp")):
        yield Problem(check="files", where=path.name, text="left by a run that was stopped; remove it")


def _share_problems(files: ModelFiles, report: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Parameters that config.json or the report says are quantised, and are floats."""
    said = {} if report is None else {name: tensor["scheme"] for name, tensor in report_tensors(report).items()}
    targeted = _targets(read_json(files.folder / "config.json"))
    for name in sorted(said.keys() - {cell.label for entry in files.manifest.entries for cell in hub_cells(entry)}):
        yield Problem(check="share", where=name, text=f"the report says {said[name]}, there is no such tensor")
    for entry in files.manifest.entries:
        scheme = files.schemes.get(entry.path)
        for cell in hub_cells(entry):
            expected = said.get(cell.label)
            if expected is not None and scheme is not None and not _is_stored_as(scheme, expected, entry.shape[-1]):
                text = f"the report says {expected}, the tensor is {scheme.name}"
                yield Problem(check="share", where=cell.label, text=text)
            if not _is_plain(files, cell.tensor):
                continue
            if expected is not None:
                yield Problem(check="share", where=cell.label, text=f"the report says {expected}, the tensor is float")
            elif entry.role not in FLOAT_ROLES and targeted(cell.tensor):
                text = "config.json's groups take it in and its ignore list does not leave it out, the tensor is float"
                yield Problem(check="share", where=cell.label, text=text)


def _is_stored_as(scheme: Scheme, expected: str, in_size: int) -> bool:
    """Whether a scheme's name says how a matrix is stored: a group of all inputs is a channel in some formats."""
    try:
        other = parse_scheme(expected)
    except RecipeError:
        return False
    alike = replace(other, group=None) == replace(scheme, group=None)
    return alike and other.group_size(in_size) == scheme.group_size(in_size)


def _targets(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether compressed-tensors' configuration says that a weight is quantised; False in other formats."""
    inner = config.get("text_config") or {}
    data = config.get("quantization_config") or inner.get("quantization_config") or {}
    if data.get("quant_method") != "compressed-tensors":
        return lambda name: False
    groups = data.get("config_groups", {}).values()
    targets = [target for group in groups for target in group["targets"]]
    ignore = data.get("ignore") or []

    def targeted(name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(_names(t, module, "Linear") for t in targets) and not any(_names(i, module, "") for i in ignore)

    return targeted


def _names(pattern: str, module: str, kind: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern in (module, kind)


def _paired(files: ModelFiles, original: ModelFiles, state: _State) -> ModelFiles | None:
    """The source, if its parameters have the same shapes: the result may have more, such as a head untied."""
    shapes = {entry.path: entry.shape for entry in files.manifest.entries}
    for entry in original.manifest.entries:
        if shapes.get(entry.path) != entry.shape:
            here = "none" if entry.path not in shapes else str(list(shapes[entry.path]))
            text = f"{entry.path} has shape {list(entry.shape)} in {original.folder}, {here} here: another model"
            state.problems.append(Problem(check="source", where="config.json", text=text))
            return None
    return original


def _source_problems(files: ModelFiles, original: ModelFiles) -> Iterator[Problem]:
    """Files beside the weights that the source has and the result lost, and copied tensors likewise."""
    for path in sorted(original.folder.iterdir()):
        if is_side_file(path) and not (files.folder / path.name).is_file():
            yield Problem(check="source", where=path.name, text="the source has this file, the result has not")
    for name in original.not_loaded:
        if name not in files.checkpoint.tensors:
            yield Problem(check="source", where=name, text="the source has this tensor, the result has not")


def _check_entry(files: ModelFiles, entry: Entry, original: ModelFiles | None, state: _State) -> None:
    """Values, scales and grid of each cell; against the source, floats are the same and integers near."""
    exact_entry = _source_entry(entry, original)
    exact_cells = hub_cells(entry) if exact_entry is None else hub_cells(exact_entry)
    for cell, exact_cell in zip(hub_cells(entry), exact_cells, strict=True):
        plain = _is_plain(files, cell.tensor)
        signal = noise = 0.0
        for rows in _row_slices(entry):
            values = _checked(files, entry, cell, rows, state)
            if values is None:
                break
            if original is None or exact_entry is None:
                continue
            exact = _exact(original, exact_entry, exact_cell, rows)
            if plain:
                exact = exact.astype(files.checkpoint.tensors[cell.tensor].dtype).astype(np.float32)
            signal += float(np.square(exact, dtype=np.float64).sum())
            noise += float(np.square(values - exact, dtype=np.float64).sum())
        else:
            if exact_entry is not None:
                state.problems += _compare(cell, plain, signal, noise)
                if not plain:
                    state.sqnr_db[cell.label] = 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def _checked(files: ModelFiles, entry: Entry, cell: Cell, rows: slice, state: _State) -> np.ndarray | None:
    """Some rows of a cell as floats; None: they cannot be used, which is noted."""
    scheme, check = files.schemes.get(entry.path), "scales"
    try:
        if scheme is not None:
            whole = slice(0, scheme.scales_shape(cell_shape(entry))[-1])
            files.source.read(entry, cell, (rows, whole), "scale")
        check = "values"
        if scheme is not None:
            _check_grid(files, entry, cell, rows, scheme, state)
        values = _read(files, entry, cell, rows)
        if not np.isfinite(values).all():
            raise WeightsError("a value is NaN or infinite")
    except WeightsError as error:
        state.problems.append(Problem(check=check, where=cell.label, text=str(error)))
        return None
    return values


def _exact(original: ModelFiles, entry: Entry, cell: Cell, rows: slice) -> np.ndarray:
    """Some rows of the source's cell.

    Raises:
        WeightsError: they cannot be compared with, which says nothing about the result.
    """
    try:
        exact = _read(original, entry, cell, rows)
    except WeightsError as error:
        raise WeightsError(f"the source {original.folder} is damaged: {error}") from error
    if not np.isfinite(exact).all():
        raise WeightsError(f"the source {original.folder} is damaged: {cell.label}: a value is NaN or infinite")
    return exact


def _compare(cell: Cell, plain: bool, signal: float, noise: float) -> Iterator[Problem]:
    if plain and noise > 0:
        yield Problem(check="source", where=cell.label, text="a float tensor is not the source's")
    elif signal == 0 and noise > 0:
        yield Problem(check="sqnr", where=cell.label, text="the source is all zero, the result is not")


def _source_entry(entry: Entry, original: ModelFiles | None) -> Entry | None:
    """The same parameter of the source, which may name and fuse its tensors in another way."""
    entries = () if original is None else original.manifest.entries
    return next((other for other in entries if other.path == entry.path), None)


def _is_plain(files: ModelFiles, tensor: str) -> bool:
    return isinstance(files.source.stored[tensor].encoding, Plain)


def _row_slices(entry: Entry) -> Iterator[slice]:
    """Parts of a cell's first axis of bounded size."""
    rows, *rest = cell_shape(entry)
    step = max(1, _CHUNK_ELEMENTS // math.prod(rest))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _read(files: ModelFiles, entry: Entry, cell: Cell, rows: slice) -> np.ndarray:
    rest = (slice(0, size) for size in cell_shape(entry)[1:])
    return files.source.read(entry, cell, (rows, *rest)).astype(np.float32)


def _check_grid(files: ModelFiles, entry: Entry, cell: Cell, rows: slice, scheme: Scheme, state: _State) -> None:
    """Integers beyond the symmetric grid, which our own kernels do not expect; other tools may use -128."""
    if not isinstance(files.quantization, QuantizationConfig):
        return
    shape = cell_shape(entry)
    stored = scheme.values_shape(shape)
    values = files.source.read(entry, cell, (rows, slice(0, stored[-1])), "values")
    if scheme.weight_bits == 4:
        values = pairs_to_int8(values, scheme.group_size(shape[-1]))
    lowest = -(QMAX if scheme.weight_bits == 8 else QMAX_OF_4)
    if (values < lowest).any():
        text = f"an integer is {int(values.min())}, the grid of {scheme.name} ends at {lowest}"
        state.problems.append(Problem(check="grid", where=cell.label, text=text))


def _ratio_problems(ratios: Mapping[str, float | None], least: float) -> Iterator[Problem]:
    for label, ratio in ratios.items():
        if ratio is not None and ratio < least:
            text = f"SQNR {ratio:.2f} dB is below {least:g} dB"
            yield Problem(check="sqnr", where=label, text=text)


def _verification(
    files: ModelFiles, source: Path | None, measured: Literal["source", "report"] | None, state: _State
) -> Verification:
    rows = role_rows(files, state.sqnr_db)
    quantised = sum(row.nbytes for row in rows if row.scheme != "float")
    return Verification(
        folder=str(files.folder),
        method=method_name(files.quantization),
        source=None if source is None else str(source),
        sqnr_of=measured,
        rows=rows,
        tensors=len(files.checkpoint.tensors),
        nbytes=files.tensor_bytes,
        quantised_share=quantised / files.tensor_bytes,
        problems=tuple(state.problems),
    )
