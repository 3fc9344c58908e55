"""Loads a checkpoint: tensor rules x manifest x plan -> sharded leaves, each device reading only its own slices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError
from jaxmoe.models.leaves import Leaf, model_leaves
from jaxmoe.models.manifest import Manifest, build_manifest
from jaxmoe.models.registry import read_config
from jaxmoe.ops.pages import KVDtype
from jaxmoe.parallel.placement import ExpertPlacement
from jaxmoe.parallel.plan import Plan
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.complete import check_complete, check_entry_values
from jaxmoe.weights.formats import QuantizationConfig, read_quantization, schemes_of
from jaxmoe.weights.safetensors import Checkpoint, open_checkpoint

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A checked checkpoint folder, nothing read yet but headers."""

    folder: Path
    manifest: Manifest
    checkpoint: Checkpoint
    quantization: QuantizationConfig | None
    schemes: Mapping[str, Scheme | None]
    unused: tuple[str, ...]
    """Tensors that this version knows and does not load."""

    @property
    def kv_cache(self) -> KVDtype:
        """Storage of keys and values that the checkpoint asks for; float32 for a float one."""
        return "float32" if self.quantization is None else self.quantization.kv_cache

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(meta.nbytes for meta in self.checkpoint.tensors.values())


def open_model(folder: Path) -> ModelFiles:
    """Reads config.json and all headers, and checks that everything is there.

    Raises:
        ConfigError: the folder or its config.json is absent or wrong.
        UnsupportedError: the family, an option or a format is not supported.
        WeightsError: files or tensors are missing, damaged or left over.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint (with config.json)")
    where = str(folder / "config.json")
    data = read_json(folder / "config.json")
    family, config = read_config(data, where)
    quantization = read_quantization(data, where)
    manifest = build_manifest(family, config)
    schemes = schemes_of(quantization, manifest, where)
    checkpoint = open_checkpoint(folder)
    unused = check_complete(checkpoint, manifest, schemes)
    return ModelFiles(
        folder=folder,
        manifest=manifest,
        checkpoint=checkpoint,
        quantization=quantization,
        schemes=schemes,
        unused=unused,
    )


def load_leaves(
    files: ModelFiles, plan: Plan, mesh: Mesh, dtype: Any, progress: Progress | None = None
) -> tuple[tuple[Leaf, ...], list[jax.Array]]:
    """Reads every leaf onto the mesh; no device holds more than its part at any time.

    Args:
        files: a checked checkpoint.
        plan: how leaves are split.
        mesh: the plan's mesh.
        dtype: dtype of float weights in memory (router weights stay float32).
        progress: called after each leaf.

    Raises:
        WeightsError: a tensor holds an illegal value.
    """
    leaves = model_leaves(files.manifest, files.schemes, plan, dtype)
    total = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    done = 0
    arrays = []
    for leaf in leaves:
        arrays.append(_load_leaf(files.checkpoint, leaf, plan, mesh))
        done += int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        if progress is not None:
            progress(done, total)
    return leaves, arrays


def _load_leaf(checkpoint: Checkpoint, leaf: Leaf, plan: Plan, mesh: Mesh) -> jax.Array:
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def block(index: Any) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        if bounds not in blocks:
            blocks[bounds] = read_block(checkpoint, leaf, bounds, plan)
        return blocks[bounds]

    return jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, leaf.spec), block)


def read_block(checkpoint: Checkpoint, leaf: Leaf, bounds: tuple[tuple[int, int], ...], plan: Plan) -> np.ndarray:
    """The physical block [start, stop) per axis of a leaf: zero weights and unit scales where nothing lives.

    Raises:
        WeightsError: a scale is not positive and finite.
    """
    shape = tuple(stop - start for start, stop in bounds)
    out = aligned_full(shape, 1 if leaf.part == "scale" else 0, leaf.dtype)
    entry = leaf.entry
    lead = entry.lead
    # The vocabulary is the only split axis inside a tensor; its padded rows lie past the logical size.
    inner = tuple(
        slice(start, min(stop, size))
        for (start, stop), size in zip(bounds[lead:], leaf_sizes(leaf)[lead:], strict=True)
    )
    if any(part.start >= part.stop for part in inner):
        return out
    slots = (
        ExpertPlacement(num_experts=entry.shape[1], num_ranks=plan.ways("experts")).slot_of_expert()
        if "experts" in entry.axes
        else None
    )
    for position, tensor in entry.tensors():
        if slots is not None:
            position = (position[0], int(slots[position[1]]))
        offsets = tuple(p - start for p, (start, _) in zip(position, bounds[:lead], strict=True))
        if not all(0 <= offset < size for offset, size in zip(offsets, shape[:lead], strict=True)):
            continue
        name = leaf.hub_name(tensor)
        array = checkpoint.read(name, inner)
        check_entry_values(entry, name, array, leaf.part)
        out[(*offsets, *(slice(0, size) for size in array.shape))] = array.astype(leaf.dtype)
    return out


def leaf_sizes(leaf: Leaf) -> tuple[int, ...]:
    """Logical sizes of a leaf's axes."""
    if leaf.part == "weight":
        return leaf.entry.shape
    return (*leaf.entry.shape[:-1], leaf.shape[-1])


def aligned_full(shape: tuple[int, ...], value: int, dtype: np.dtype) -> np.ndarray:
    """A filled array whose data starts at a multiple of 64 bytes.

    JAX's CPU devices take such a buffer without a copy, so devices that hold the same replicated leaf share one.
    """
    raw = np.empty(int(np.prod(shape)) * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
    out.fill(value)
    return out
