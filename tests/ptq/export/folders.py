"""Writes a source's tensors, rounded to nearest, through an output format: what a stream does, without one."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.models.manifest import Manifest
from jaxmoe.ptq.export.output import OutputFormat
from jaxmoe.ptq.recipe import Match
from jaxmoe.quant.qarray import quantize_weight
from jaxmoe.quant.scheme import parse_scheme
from jaxmoe.weights.cells import cell_shape, hub_cells, own_cells
from jaxmoe.weights.formats import FLOAT_ROLES
from jaxmoe.weights.layout import index_text, plan_shards, write_at
from jaxmoe.weights.load import open_model
from tests import tiny

EXPERTS = ("experts.gate", "experts.up", "experts.down")
INT4_EXPERTS = {"": "w8a8-channel", **dict.fromkeys(EXPERTS, "w4a8-channel")}
"""In ascendv1 4-bit weights have one scale a row."""


def matched(manifest: Manifest, schemes: Mapping[str, str]) -> tuple[Match, ...]:
    """Role -> scheme; '' stands for all other roles that may be quantised, 'float' for none."""
    matches = []
    for entry in manifest.entries:
        name = "float" if entry.role in FLOAT_ROLES else schemes.get(entry.role, schemes.get("", "float"))
        scheme = None if name == "float" else parse_scheme(name)
        matches.append(Match(entry=entry, rule=0, scheme=scheme))
    return tuple(matches)


def tiny_matches(family: str, schemes: Mapping[str, str], **changes: Any) -> tuple[tuple[Match, ...], Manifest]:
    manifest = tiny.manifest_of(tiny.changed(family, changes))
    return matched(manifest, schemes), manifest


def write(
    folder: Path, source: Path, output: OutputFormat, schemes: Mapping[str, str], *, max_shard_bytes: int = 200_000
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Writes the result's folder; returns the integers and scales of each own tensor that was rounded."""
    files = open_model(source)
    matches = matched(files.manifest, schemes)
    output.check(matches)
    arrays: dict[str, np.ndarray] = {}
    specs = []
    rounded = {}
    for match in matches:
        entry, scheme = match.entry, match.scheme
        whole = tuple(slice(0, size) for size in cell_shape(entry))
        for hub, own in zip(hub_cells(entry), own_cells(entry), strict=True):
            assert own.row is None
            weight = files.source.read(entry, hub, whole)
            specs += output.specs(own.tensor, entry.own_shape, scheme, weight.dtype)
            if scheme is None:
                arrays[own.tensor] = weight
                continue
            array = quantize_weight(jnp.asarray(weight), scheme)
            integers, scales = np.asarray(array.integers()), np.asarray(array.scale)
            arrays.update(output.tensors(own.tensor, integers, scales, scheme))
            rounded[own.tensor] = integers, scales
    for name in files.not_loaded:
        arrays[name] = files.checkpoint.read(name)
        specs += output.specs(name, arrays[name].shape, None, arrays[name].dtype)
    write_arrays(folder, output, arrays, specs, max_shard_bytes)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    texts = output.side_files(matches, copied=files.not_loaded)
    config = output.config(config, matches, files.manifest, kv_cache="int8", copied=files.not_loaded)
    for name, text in {**texts, "config.json": json.dumps(config)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path in source.iterdir():
        if path.suffix not in (".safetensors", ".json"):
            shutil.copyfile(path, folder / path.name)
    return rounded


def write_arrays(
    folder: Path, output: OutputFormat, arrays: Mapping[str, np.ndarray], specs: list[Any], max_shard_bytes: int
) -> None:
    """Shards and index under the format's names; each array is what its spec says."""
    folder.mkdir(parents=True)
    assert {spec.name for spec in specs} == set(arrays)
    plans = plan_shards(specs, max_shard_bytes=max_shard_bytes, file_name=output.shard_name)
    by_name = {spec.name: spec for spec in specs}
    for plan in plans:
        path = folder / plan.file_name
        path.write_bytes(plan.head + bytes(plan.nbytes - len(plan.head)))
        for name, offset in plan.offsets_bytes.items():
            array, spec = arrays[name], by_name[name]
            assert (array.dtype, array.shape) == (spec.dtype, spec.shape), spec
            write_at(path, offset, array)
    (folder / output.index_name).write_text(index_text(specs, plans), encoding="utf-8")
