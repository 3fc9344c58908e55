"""Rotated float checkpoints of tiny models, written for tests through the rotated source."""

import json
from pathlib import Path

import numpy as np

from jaxmoe.ptq.rotation.plan import RotationRecipe
from jaxmoe.ptq.rotation.source import RotatedFiles, rotate_files
from jaxmoe.weights.cells import cell_shape, hub_cells, own_cells
from jaxmoe.weights.load import open_model
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec


def rotate_folder(folder: Path, recipe: RotationRecipe) -> RotatedFiles:
    """A rotated checkpoint, nothing written."""
    return rotate_files(open_model(folder), recipe)


def write_rotated(rotated: RotatedFiles, out: Path) -> Path:
    """The rotated checkpoint in float32 under our own names, and its config.json."""
    entries = rotated.files.manifest.entries
    specs = {
        name: TensorSpec(name=name, dtype=np.dtype(np.float32), shape=entry.own_shape)
        for entry in entries
        for _, name in entry.own_tensors()
    }
    out.mkdir(parents=True)
    with CheckpointWriter(out, list(specs.values())) as writer:
        for entry in entries:
            whole = tuple(slice(0, size) for size in cell_shape(entry))
            for hub, own in zip(hub_cells(entry), own_cells(entry), strict=True):
                array = rotated.source.read(entry, hub, whole).astype(np.float32)
                if own.row is None:
                    writer.write(own.tensor, array)
                else:
                    writer.write_rows(own.tensor, own.row, array[None])
    data = json.loads((rotated.files.folder / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(rotated.config_json(data)), encoding="utf-8")
    return out
