"""Leaves: what each parameter becomes in memory, given the schemes and the plan. Abstract: shapes, dtypes, splits.

One table for the loader (fills them), the ledger (counts them), the runner (passes them) and the quantiser (writes
their hub form).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmoe.errors import PlanError
from jaxmoe.models.manifest import Entry, Manifest
from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.parallel.plan import Plan
from jaxmoe.quant.qarray import QArray
from jaxmoe.quant.scheme import Scheme

Schemes = Mapping[str, Scheme | None]
"""Parameter path -> scheme; None or absent: float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of the step: a float weight, integer values, or scales."""

    entry: Entry
    part: Literal["weight", "scale"]
    scheme: Scheme | None
    shape: tuple[int, ...]
    """Physical shape over all devices: experts and vocabulary padded to equal parts."""
    axes: tuple[str, ...]
    dtype: np.dtype
    spec: PartitionSpec

    @property
    def nbytes(self) -> int:
        """Bytes over all devices, each part once."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shard_bytes(self, plan: Plan) -> int:
        """Bytes of one device's part."""
        return self.nbytes // math.prod(plan.ways(axis) for axis in self.axes)

    def hub_name(self, tensor: str) -> str:
        """Name of the hub tensor that holds this part of `tensor`."""
        return tensor if self.part == "weight" else scale_name(tensor)


def scale_name(tensor: str) -> str:
    """Name of a quantised tensor's scales: 'x.weight' -> 'x.weight_scale'."""
    return f"{tensor}_scale"


def entry_leaves(entry: Entry, scheme: Scheme | None, plan: Plan, dtype: Any) -> tuple[Leaf, ...]:
    """The arrays that hold one parameter: one, or integer values and their scales."""
    shape = plan.physical_shape(entry.shape, entry.axes)
    if scheme is None:
        kept = np.dtype(jnp.float32) if entry.float32 else np.dtype(dtype)
        spec = plan.spec(entry.axes)
        return (Leaf(entry=entry, part="weight", scheme=None, shape=shape, axes=entry.axes, dtype=kept, spec=spec),)
    scale_axes = (*entry.axes[:-1], "groups")
    return (
        Leaf(
            entry=entry,
            part="weight",
            scheme=scheme,
            shape=scheme.values_shape(shape),
            axes=entry.axes,
            dtype=np.dtype(scheme.values_dtype),
            spec=plan.spec(entry.axes),
        ),
        Leaf(
            entry=entry,
            part="scale",
            scheme=scheme,
            shape=scheme.scales_shape(shape),
            axes=scale_axes,
            dtype=np.dtype(jnp.float32),
            spec=plan.spec(scale_axes),
        ),
    )


def model_leaves(manifest: Manifest, schemes: Schemes, plan: Plan, dtype: Any) -> tuple[Leaf, ...]:
    """All leaves of a model, in the manifest's order.

    Raises:
        PlanError: the plan splits heads or their outputs unevenly.
    """
    _check_heads(manifest.config, plan)
    return tuple(
        leaf for entry in manifest.entries for leaf in entry_leaves(entry, schemes.get(entry.path), plan, dtype)
    )


def _check_heads(config: DecoderConfig, plan: Plan) -> None:
    """Heads are split whole: an even split of their dims is not enough."""
    ways, attention = plan.ways("q_heads"), config.attention
    counts = {"attention heads": attention.heads, "hidden size": config.embed}
    if isinstance(attention, AttentionConfig):
        counts["key-value heads"] = attention.kv_heads
    for name, count in counts.items():
        if count % ways:
            raise PlanError(
                f"{plan.source}: {count} {name} cannot be split {ways} ways (rule heads, mesh {dict(plan.mesh)}); "
                "choose a divisor"
            )


def assemble(leaves: tuple[Leaf, ...], arrays: list[Any]) -> dict[str, Any]:
    """Parameter path -> Array or QArray from arrays in the order of `leaves`; works on tracers and abstract values."""
    weights: dict[str, Any] = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        if leaf.scheme is None:
            weights[leaf.entry.path] = array
        elif leaf.part == "weight":
            weights[leaf.entry.path] = QArray(qvalue=array, scale=None, scheme=leaf.scheme)
        else:
            values = weights[leaf.entry.path]
            weights[leaf.entry.path] = QArray(qvalue=values.qvalue, scale=array, scheme=leaf.scheme)
    return weights
