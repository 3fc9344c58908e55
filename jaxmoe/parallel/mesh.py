"""The only caller of make_mesh: `jax.make_mesh` makes Explicit axes by default, and this project wants Auto ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxmoe.errors import PlanError


def make(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the given axis sizes, outermost first, over the first devices.

    Raises:
        PlanError: the mesh needs more devices than exist; both numbers are named.
    """
    devices = jax.devices() if devices is None else devices
    need = math.prod(axes.values())
    if need > len(devices):
        raise PlanError(
            f"the mesh {dict(axes)} needs {need} devices, this process has {len(devices)} "
            f"({devices[0].platform}); ask for fewer with --devices"
        )
    names = tuple(axes)
    return jax.make_mesh(tuple(axes.values()), names, axis_types=(AxisType.Auto,) * len(names), devices=devices[:need])
