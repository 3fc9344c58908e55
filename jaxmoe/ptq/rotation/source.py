"""A checkpoint as if it had been rotated: cells are turned in float32 while they are read, and nothing is stored.

Whatever reads cells (calibration, rounding, writing) sees the rotated model, and its weights are rounded once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np

from jaxmoe.errors import RecipeError, UnsupportedError, WeightsError
from jaxmoe.models.manifest import Entry, Manifest, build_manifest
from jaxmoe.models.registry import FAMILIES
from jaxmoe.ptq.rotation.hadamard import rotate_
from jaxmoe.ptq.rotation.plan import Change, RotationPlan, RotationRecipe, Side, plan_rotation
from jaxmoe.weights.cells import Cell, Source, Stored, cell_shape, hub_cells
from jaxmoe.weights.encodings import Index, Plain
from jaxmoe.weights.load import ModelFiles
from jaxmoe.weights.safetensors import Checkpoint

_FLOAT32 = np.dtype(np.float32)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedSource:
    """`weights.cells.Source` of a rotated model.

    `checkpoint` and `stored` are those of the files: what a cell is read from, not what it is read as (`dtype`).
    """

    inner: Source
    manifest: Manifest
    plan: RotationPlan

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors as they are on disk."""
        return self.inner.checkpoint

    @property
    def stored(self) -> Mapping[str, Stored]:
        """How each logical tensor is stored on disk."""
        return self.inner.stored

    def read(
        self, entry: Entry, cell: Cell, index: Index, part: Literal["float", "values", "scale"] = "float"
    ) -> np.ndarray:
        """A part of a rotated cell as float32; of one that stays as it is, what `Source.read` gives.

        A channel of the result needs all channels of its block, or of its head where only a part of each head turns;
        beside them nothing is read. Every part has the bits that it has in the whole cell.

        Raises:
            WeightsError: a value or a scale is illegal, or integers of a rotated parameter are asked for.
        """
        change = self.plan.changes.get(entry.path)
        if change is None:
            return self.inner.read(entry, cell, index, part)
        if part != "float":
            raise WeightsError(f"{cell.label}: its integers cannot be rotated; give the checkpoint they were made from")
        shape = cell_shape(entry)
        wanted = [range(*piece.indices(size)) for piece, size in zip(index, shape, strict=True)]
        sizes = tuple(len(piece) for piece in wanted)
        if change.ones or 0 in sizes:
            return np.ones(sizes, _FLOAT32)
        covered = _cover(wanted, change)
        slices = tuple(slice(piece.start, piece.stop, piece.step) for piece in covered)
        array = np.array(self.inner.read(entry, cell, slices), _FLOAT32, order="C")
        if change.gains:
            array *= self._gain(change, cell, shape[-1])[slices[-1]]
        if change.columns is not None:
            _turn(array, change.columns, covered[-1].start, axis=array.ndim - 1)
        if change.rows is not None:
            _turn(array, change.rows, covered[-2].start, axis=array.ndim - 2)
        inside = zip(wanted, covered, strict=True)
        return np.ascontiguousarray(array[tuple(_within(piece, whole) for piece, whole in inside)])

    def dtype(self, entry: Entry, cell: Cell) -> np.dtype:
        """Dtype of what `read` gives: float32 where it rotates."""
        return _FLOAT32 if entry.path in self.plan.changes else self.inner.dtype(entry, cell)

    def kept_dtype(self, entry: Entry, cell: Cell) -> np.dtype:
        """Dtype that a cell may be written in when it stays float.

        What routes and indexes (`Entry.float32`) chooses by small differences, so it is not rounded again after it
        turned. All other floats may have the source's dtype: norms are ones, and a turned embedding, head or kv_b_proj
        errs by no more than every activation that meets it.
        """
        rotated = entry.float32 and entry.path in self.plan.changes
        return _FLOAT32 if rotated else self.inner.kept_dtype(entry, cell)

    def _gain(self, change: Change, cell: Cell, width: int) -> np.ndarray:
        """[width] float32: the gains that a cell's columns are multiplied by."""
        parts = []
        for gain in change.gains:
            path, position = gain.at(cell.position)
            norm = self.manifest[path]
            where = next(found for found in hub_cells(norm) if found.position == position)
            parts.append(self.inner.read(norm, where, (slice(0, norm.shape[-1]),)).astype(_FLOAT32))
        joined = np.concatenate(parts)
        assert joined.shape == (width,), (cell, joined.shape, width)
        return joined


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedFiles:
    """A checkpoint and how it turns."""

    files: ModelFiles
    """The model that the rotated checkpoint will be; its own `source` is not rotated."""
    source: RotatedSource
    untied: bool
    """Whether it has a head of its own that the original has not."""

    def config_json(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of the rotated model from that of the original."""
        if not self.untied:
            return dict(data)
        changed: dict[str, Any] = {**data, "tie_word_embeddings": False}
        if "text_config" in data:
            changed["text_config"] = {**data["text_config"], "tie_word_embeddings": False}
        return changed


def rotate_files(files: ModelFiles, recipe: RotationRecipe) -> RotatedFiles:
    """Decides all of a rotation; nothing but headers is read.

    Raises:
        RecipeError: see `plan_rotation`; tensors of parts that are not run would no longer fit.
        UnsupportedError: a tied embedding is stored in another way than plain floats.
    """
    untied = recipe.residual and recipe.tied == "untie" and files.manifest.config.tied_head
    result = _without_parts(files, recipe) if recipe.residual else files
    result = _untie(result) if untied else result
    plan = plan_rotation(result.manifest, recipe)
    source = RotatedSource(inner=result.source, manifest=result.manifest, plan=plan)
    return RotatedFiles(files=result, source=source, untied=untied)


def _without_parts(files: ModelFiles, recipe: RotationRecipe) -> ModelFiles:
    """Without the multi-token-prediction blocks and tensors of parts that are not run, where the recipe says so."""
    family, config = FAMILIES[files.manifest.config.family], files.manifest.config
    foreign = [name for name in files.not_loaded if not _harmless(name, files)]
    if foreign and recipe.not_run == "refuse":
        raise RecipeError(
            f"rotation: {len(foreign)} tensors, such as {foreign[0]}, belong to parts that are not run; where they "
            "write or read the residual stream they would not fit a rotated one; set not_run = 'drop' to leave them out"
        )
    kept = tuple(name for name in files.not_loaded if name not in foreign)
    files = replace(files, not_loaded=kept)
    if recipe.mtp != "drop" or not config.mtp_layers:
        return files
    config = replace(config, mtp_layers=0, mtp_copies=False)
    manifest = build_manifest(family, config, set(files.source.stored))
    return replace(files, manifest=manifest)


def _harmless(name: str, files: ModelFiles) -> bool:
    """Rotary frequencies, and a tied head given again."""
    head = files.manifest.config.tied_head and name in _head_names(files)
    return head or name.endswith(".rotary_emb.inv_freq")


def _head_names(files: ModelFiles) -> set[str]:
    rules = FAMILIES[files.manifest.config.family].tensors
    return {hub.name for rule in rules if rule.path == "head.weight" for hub in rule.hubs}


def _untie(files: ModelFiles) -> ModelFiles:
    """The model with a head of its own, which lies where the embedding lies; a head given again is left out."""
    embed = files.manifest["embed.weight"]
    stored = files.source.stored[embed.hub]
    if not isinstance(stored.encoding, Plain):
        raise UnsupportedError(
            f"rotation: {embed.hub} is stored as {stored.encoding.label()}; only an embedding of plain floats can be "
            "untied"
        )
    config = replace(files.manifest.config, tied_head=False)
    manifest = build_manifest(FAMILIES[config.family], config, set(files.source.stored))
    head = manifest["head.weight"].hub
    old = files.source.checkpoint
    alias = replace(old.tensors[embed.hub], name=head)
    tensors = dict(sorted({**old.tensors, head: alias}.items()))
    checkpoint = Checkpoint(folder=old.folder, tensors=tensors, unused_files=old.unused_files)
    source = Source(checkpoint=checkpoint, stored={**files.source.stored, head: stored})
    again = _head_names(files)
    return replace(
        files,
        manifest=manifest,
        source=source,
        not_loaded=tuple(name for name in files.not_loaded if name not in again),
    )


def _cover(wanted: list[range], change: Change) -> list[range]:
    """What must be read of each axis."""
    covered = list(wanted)
    for axis, side in ((-1, change.columns), (-2, change.rows)):
        if side is not None:
            unit = side.rotation.block if side.period == side.rotation.size else side.period
            first, last = wanted[axis][0], wanted[axis][-1]
            covered[axis] = range(first // unit * unit, (last // unit + 1) * unit)
    return covered


def _within(wanted: range, covered: range) -> slice:
    """Where a range lies in another one that holds it."""
    first, last = covered.index(wanted[0]), covered.index(wanted[-1])
    return slice(first, last + 1, max(1, wanted.step // covered.step))


def _turn(array: np.ndarray, side: Side, first: int, axis: int) -> None:
    """array <- array R along an axis that begins with channel `first`, in place."""
    rotation = side.rotation
    if side.period == rotation.size:
        rotate_(array, rotation, axis=axis, first=first)
        return
    shape = array.shape
    periods = array.reshape(*shape[:axis], -1, side.period, *shape[axis + 1 :])
    part = periods[(*(slice(None),) * (axis + 1), slice(side.start, side.start + rotation.size))]
    rotate_(part, rotation, axis=axis + 1)
