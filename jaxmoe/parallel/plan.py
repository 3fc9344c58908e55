"""Sharding plans: which mesh axes split which axes of the vocabulary, read from sharding/<family>/<topology>.toml."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax.sharding import PartitionSpec

from jaxmoe.axes import RULE_OF_AXIS, RULES
from jaxmoe.decode import decode, read_toml
from jaxmoe.errors import PlanError

_PADDED_AXES = frozenset({"experts", "vocab"})
_REQUIRED = ("tokens", "pages", "experts", "vocab")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A mesh and one entry per rule of `axes.RULES`.

    Invariants (checked on construction): every entry is a known rule with known mesh axes in the mesh's order, `tokens`
    and `pages` are split alike, and every mesh axis splits either them or `heads` and not both (no device repeats
    another's attention). `experts` and `vocab` may be split over any of them; `heads` may be left out.
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
        unknown = sorted(set(self.rules) - set(RULES))
        if unknown:
            raise PlanError(f"{self.source}: rule for unknown axis {', '.join(unknown)}; known: {', '.join(RULES)}")
        missing = [name for name in _REQUIRED if name not in self.rules]
        if missing:
            raise PlanError(f"{self.source}: no rule for axis {', '.join(missing)}; write [] for replicated")
        order = list(self.mesh)
        for axis, mesh_axes in self.rules.items():
            wrong = [name for name in mesh_axes if name not in self.mesh]
            if wrong or len(set(mesh_axes)) != len(mesh_axes):
                raise PlanError(
                    f"{self.source}: rule {axis} = {list(mesh_axes)} does not fit the mesh {dict(self.mesh)}: each "
                    "mesh axis may appear once and must exist"
                )
            if list(mesh_axes) != sorted(mesh_axes, key=order.index):
                raise PlanError(
                    f"{self.source}: rule {axis} = {list(mesh_axes)} must name mesh axes in the mesh's order {order}"
                )
        for name, size in self.mesh.items():
            if size < 1:
                raise PlanError(f"{self.source}: mesh axis {name} has size {size}; sizes start at 1")
        tokens, heads = self.rules["tokens"], self.rules.get("heads", ())
        if {*tokens, *heads} != set(self.mesh) or set(tokens) & set(heads) or self.rules["pages"] != tokens:
            raise PlanError(
                f"{self.source}: tokens = {list(tokens)} and pages = {list(self.rules['pages'])} must be equal, and "
                f"every mesh axis of {order} must split either them or heads = {list(heads)}: otherwise attention work "
                "would be repeated"
            )
        if self.scalable and self.scalable not in self.mesh:
            raise PlanError(f"{self.source}: scalable = {self.scalable!r} is not a mesh axis of {dict(self.mesh)}")

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    def ways(self, axis: str) -> int:
        """Number of parts that `axis` is split into (1: replicated)."""
        return math.prod(self.mesh[name] for name in self.mesh_axes(axis))

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Mesh axes that split `axis`, outermost first."""
        return tuple(self.rules.get(RULE_OF_AXIS.get(axis, ""), ()))

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """How an array with these axis names is split.

        Raises:
            PlanError: two of the axes are split over the same mesh axis.
        """
        parts: list[tuple[str, ...] | None] = []
        used: dict[str, str] = {}
        for axis in axes:
            mesh_axes = self.mesh_axes(axis)
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
        """The shape in memory: experts and vocabulary are padded to equal parts.

        Raises:
            PlanError: another axis does not divide into equal parts; both numbers are named.
        """
        for size, axis in zip(shape, axes, strict=True):
            if axis not in _PADDED_AXES and size % self.ways(axis):
                raise PlanError(
                    f"{self.source}: axis {axis} of size {size} cannot be split {self.ways(axis)} ways "
                    f"(mesh {dict(self.mesh)}, rule {RULE_OF_AXIS[axis]} = {list(self.mesh_axes(axis))}); "
                    "choose a divisor"
                )
        return tuple(
            -(-size // self.ways(axis)) * self.ways(axis) if axis in _PADDED_AXES else size
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
