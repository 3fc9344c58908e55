"""Sharding plans: which mesh axes split which axes of the vocabulary, read from sharding/<family>/<topology>.toml."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax.sharding import PartitionSpec

from jaxmoe.axes import AXES, RULED_AXES
from jaxmoe.decode import decode, read_toml
from jaxmoe.errors import PlanError

_SPLITTABLE_WEIGHT_AXES = frozenset({"experts", "vocab"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A mesh and one rule per ruled axis.

    Invariants (checked on construction): every rule names a known axis and known mesh axes, every ruled axis has a
    rule, `tokens` and `pages` are split alike over all mesh axes (no device repeats another's attention), and
    `experts` and `vocab` are split over a subset of them.
    """

    mesh: Mapping[str, int]
    """Mesh axis name -> size, outermost first."""
    rules: Mapping[str, tuple[str, ...]]
    """Axis name -> mesh axes that split it, outermost first; empty: replicated."""
    scalable: str = ""
    """The mesh axis that takes another device count when the user asks for one; empty: none does."""
    source: str = field(default="(code)")
    """Where the plan comes from, for messages."""

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
            PlanError: one does not hold.
        """
        unknown = sorted(set(self.rules) - set(AXES))
        if unknown:
            raise PlanError(f"{self.source}: rule for unknown axis {', '.join(unknown)}; known: {', '.join(AXES)}")
        unruled = sorted(set(self.rules) - RULED_AXES)
        if unruled:
            raise PlanError(f"{self.source}: axis {', '.join(unruled)} cannot be split by this version")
        missing = sorted(RULED_AXES - set(self.rules))
        if missing:
            raise PlanError(f"{self.source}: no rule for axis {', '.join(missing)}; write [] for replicated")
        for axis, mesh_axes in self.rules.items():
            wrong = [name for name in mesh_axes if name not in self.mesh]
            if wrong or len(set(mesh_axes)) != len(mesh_axes):
                raise PlanError(
                    f"{self.source}: rule {axis} = {list(mesh_axes)} does not fit the mesh {dict(self.mesh)}: each "
                    "mesh axis may appear once and must exist"
                )
        for name, size in self.mesh.items():
            if size < 1:
                raise PlanError(f"{self.source}: mesh axis {name} has size {size}; sizes start at 1")
        if set(self.rules["tokens"]) != set(self.mesh) or self.rules["pages"] != self.rules["tokens"]:
            raise PlanError(
                f"{self.source}: tokens = {list(self.rules['tokens'])} and pages = {list(self.rules['pages'])} must "
                f"both be split over all mesh axes {list(self.mesh)}: otherwise attention work would be repeated"
            )
        if self.scalable and self.scalable not in self.mesh:
            raise PlanError(f"{self.source}: scalable = {self.scalable!r} is not a mesh axis of {dict(self.mesh)}")

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    def ways(self, axis: str) -> int:
        """Number of parts that `axis` is split into (1: replicated)."""
        return math.prod(self.mesh[name] for name in self.rules.get(axis, ()))

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """How an array with these axis names is split.

        Raises:
            PlanError: two of the axes are split over the same mesh axis.
        """
        parts: list[tuple[str, ...] | None] = []
        used: dict[str, str] = {}
        for axis in axes:
            mesh_axes = self.rules.get(axis, ())
            for name in mesh_axes:
                if name in used:
                    raise PlanError(
                        f"{self.source}: mesh axis {name} would split both {used[name]} and {axis} of an array with "
                        f"axes {list(axes)}"
                    )
                used[name] = axis
            parts.append(mesh_axes or None)
        return PartitionSpec(*parts)

    def physical_shape(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
        """The shape in memory: split weight axes are padded to equal parts (uneven experts and vocabularies)."""
        return tuple(
            -(-size // self.ways(axis)) * self.ways(axis) if axis in _SPLITTABLE_WEIGHT_AXES else size
            for size, axis in zip(shape, axes, strict=True)
        )

    def with_devices(self, devices: int) -> "Plan":
        """The same rules on another number of devices.

        Raises:
            PlanError: no mesh axis may take the new size.
        """
        if devices == self.num_devices:
            return self
        others = self.num_devices // self.mesh[self.scalable] if self.scalable else 0
        if devices == 1:
            return replace(self, mesh=dict.fromkeys(self.mesh, 1))
        if devices < 1 or not others or devices % others:
            raise PlanError(
                f"{self.source}: the mesh {dict(self.mesh)} cannot be put on {devices} devices"
                + (f"; axis {self.scalable} scales in steps of {others}" if others else "; it names no scalable axis")
            )
        return replace(self, mesh={**self.mesh, self.scalable: devices // others})


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    mesh: Mapping[str, int]
    rules: Mapping[str, tuple[str, ...]]
    scalable: str = ""


def load_plan(path: Path) -> Plan:
    """Reads and checks a plan.

    Raises:
        ConfigError: the file is absent, not TOML, or has unknown or missing keys.
        PlanError: the plan is not consistent.
    """
    data = decode(_PlanFile, read_toml(path), where=str(path))
    return Plan(mesh=data.mesh, rules=data.rules, scalable=data.scalable, source=str(path))
