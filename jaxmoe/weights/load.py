"""Loads a checkpoint: tensor rules x manifest x plan -> sharded leaves, each device reading only its own slices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError
from jaxmoe.log import logger
from jaxmoe.models.family import Family, expand
from jaxmoe.models.leaves import Leaf, model_leaves
from jaxmoe.models.manifest import Manifest, build_manifest, stack_layers
from jaxmoe.models.registry import read_config
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.ops.pages import KVDtype
from jaxmoe.parallel.placement import ExpertPlacement
from jaxmoe.parallel.plan import Plan
from jaxmoe.quant.scheme import Scheme
from jaxmoe.weights.cells import Source, cell_axes, hub_cells
from jaxmoe.weights.complete import check_complete, logical_names, resolve, schemes_of_stored
from jaxmoe.weights.foreign import ForeignFormat, read_side_files
from jaxmoe.weights.formats import Quantization, QuantizationConfig, method_name, read_quantization, schemes_of
from jaxmoe.weights.safetensors import Checkpoint, open_checkpoint

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A checked checkpoint folder, nothing read yet but headers."""

    folder: Path
    manifest: Manifest
    source: Source
    quantization: Quantization
    schemes: Mapping[str, Scheme | None]
    not_loaded: tuple[str, ...]
    """Tensors that no parameter needs: of parts that are not run, rotary frequencies, a tied head given again."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors as they are on disk."""
        return self.source.checkpoint

    @property
    def kv_cache(self) -> KVDtype:
        """Storage of keys and values that the checkpoint was gated with; float32 where it does not say."""
        return self.quantization.kv_cache if isinstance(self.quantization, QuantizationConfig) else "float32"

    @property
    def mtp_layers(self) -> int:
        """Multi-token-prediction blocks that the checkpoint carries."""
        return self.manifest.config.mtp_layers

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
    quantization = _quantization(folder, data, where)
    checkpoint = open_checkpoint(folder)
    present = logical_names(checkpoint.tensors, quantization)
    manifest = build_manifest(family, _with_mtp(family, config, present, where), present)
    foreign = isinstance(quantization, ForeignFormat)
    schemes = {} if foreign else schemes_of(quantization, manifest, where)
    stored = resolve(manifest, quantization, schemes, checkpoint)
    not_loaded = check_complete(checkpoint, family, manifest, stored, quantization)
    return ModelFiles(
        folder=folder,
        manifest=manifest,
        source=Source(checkpoint=checkpoint, stored=stored),
        quantization=quantization,
        schemes=schemes_of_stored(manifest, stored) if foreign else schemes,
        not_loaded=not_loaded,
    )


def _quantization(folder: Path, data: Mapping[str, Any], where: str) -> Quantization:
    """What config.json or a file beside it says; ModelOpt writes the same into both."""
    named, beside = read_quantization(data, where), read_side_files(folder)
    if named is None or beside is None:
        return beside if named is None else named
    if not isinstance(named, ForeignFormat) or named.encodings != beside.encodings:
        raise ConfigError(
            f"{where} names quantisation method {method_name(named)!r}, a file beside it describes {beside.method!r}; "
            "remove the one that does not describe these weights"
        )
    return named


def _with_mtp(family: Family, config: DecoderConfig, present: set[str], where: str) -> DecoderConfig:
    """The config with the multi-token-prediction blocks that the checkpoint carries: all of them or none."""
    if not config.mtp_layers:
        return config

    layers, experts = stack_layers(family, config, "mtp"), config.moe.router.experts
    carried = {
        rule.path
        for rule in family.tensors
        if rule.path.startswith("mtp.")
        and any(name in present for hub in rule.hubs for _, name in expand(hub.name, layers, experts))
    }
    if not carried:
        logger.info("%s names %d multi-token-prediction layers, the checkpoint carries none", where, config.mtp_layers)
        return replace(config, mtp_layers=0, mtp_copies=False)
    logger.info("%s: the checkpoint carries %d multi-token-prediction layers", where, config.mtp_layers)
    return replace(config, mtp_copies=bool(carried & {"mtp.embed", "mtp.head"}))


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
    total = sum(leaf.nbytes for leaf in leaves)
    done = 0
    arrays = []
    for leaf in leaves:
        arrays.append(_load_leaf(files.source, leaf, plan, mesh))
        done += leaf.nbytes
        if progress is not None:
            progress(done, total)
    return leaves, arrays


def _load_leaf(source: Source, leaf: Leaf, plan: Plan, mesh: Mesh) -> jax.Array:
    """A leaf, one part of it on the host at a time; devices with equal parts are given the same buffer."""
    sharding = NamedSharding(mesh, leaf.spec)
    owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        owners.setdefault(bounds, []).append(device)
    parts = []
    for bounds, devices in owners.items():
        block = read_block(source, leaf, bounds, plan)
        parts.extend(jax.device_put(block, device) for device in devices)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def read_block(source: Source, leaf: Leaf, bounds: tuple[tuple[int, int], ...], plan: Plan) -> np.ndarray:
    """The physical block [start, stop) per axis of a leaf: zero weights and unit scales where nothing lives.

    Any axis may be split. Padding lies after the logical end of an axis, except that of experts, which is in their
    slots.

    Raises:
        WeightsError: a scale is not positive and finite.
    """
    shape = tuple(stop - start for start, stop in bounds)
    out = aligned_full(shape, 1 if leaf.part == "scale" else 0, leaf.dtype)
    entry, axes = leaf.entry, cell_axes(leaf.entry)
    inner = tuple(
        slice(start, min(stop, size))
        for (start, stop), size in zip(bounds[axes:], leaf_sizes(leaf)[axes:], strict=True)
    )
    if any(part.start >= part.stop for part in inner):
        return out
    slots = (
        ExpertPlacement(num_experts=entry.shape[1], num_ranks=plan.ways("experts")).slot_of_expert()
        if "experts" in entry.axes
        else None
    )
    kind = "float" if leaf.scheme is None else "values" if leaf.part == "weight" else "scale"
    for cell in hub_cells(entry):
        position = cell.position if slots is None else (cell.position[0], int(slots[cell.position[1]]))
        offsets = tuple(p - start for p, (start, _) in zip(position, bounds[:axes], strict=True))
        if all(0 <= offset < size for offset, size in zip(offsets, shape[:axes], strict=True)):
            array = source.read(entry, cell, inner, kind)
            out[(*offsets, *(slice(0, size) for size in array.shape))] = array.astype(leaf.dtype, copy=False)
    return out


def leaf_sizes(leaf: Leaf) -> tuple[int, ...]:
    """Logical sizes of a leaf's axes."""
    if leaf.scheme is None:
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
