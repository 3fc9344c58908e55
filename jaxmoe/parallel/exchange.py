"""Exchanges between the devices of a step, called inside shard_map.

`ParallelContext` is what a model sees of the mesh: names of the axes that split tokens, experts and vocabulary. With
one device every exchange is the identity, so there is one code path.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from jaxmoe.parallel.placement import ExpertPlacement
from jaxmoe.parallel.plan import Plan

Axes = tuple[tuple[str, int], ...]
"""Mesh axes as (name, size), outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """Mesh axes that split each kind of work; static under jit."""

    token_axes: Axes = ()
    expert_axes: Axes = ()
    vocab_axes: Axes = ()

    @classmethod
    def from_plan(cls, plan: Plan) -> "ParallelContext":
        """The context of a plan."""

        def axes(name: str) -> Axes:
            return tuple((axis, plan.mesh[axis]) for axis in plan.rules[name] if plan.mesh[axis] > 1)

        return cls(token_axes=axes("tokens"), expert_axes=axes("experts"), vocab_axes=axes("vocab"))

    def placement(self, num_experts: int) -> ExpertPlacement:
        """Where the routed experts live."""
        return ExpertPlacement(num_experts=num_experts, num_ranks=num_ranks(self.expert_axes))


def num_ranks(axes: Axes) -> int:
    """Devices along the axes."""
    return math.prod(size for _, size in axes)


def names(axes: Axes) -> tuple[str, ...]:
    """Mesh axis names."""
    return tuple(name for name, _ in axes)


def rank_index(axes: Axes) -> Int32[Array, ""]:
    """This device's index along the axes, row-major; 0 with no axes."""
    index = jnp.int32(0)
    for name, size in axes:
        index = index * size + lax.axis_index(name)
    return index


def gather_rows(x: Shaped[Array, "rows *rest"], axes: Axes) -> Shaped[Array, "all_rows *rest"]:
    """Rows of all devices along the axes, in rank order."""
    return lax.all_gather(x, names(axes), axis=0, tiled=True) if axes else x


def reduce_rows(x: Float[Array, "all_rows *rest"], axes: Axes) -> Float[Array, "rows *rest"]:
    """Sums over the devices along the axes and keeps this device's rows; undoes `gather_rows`."""
    return lax.psum_scatter(x, names(axes), scatter_dimension=0, tiled=True) if axes else x


def columns_to_rows(x: Shaped[Array, "all_rows part"], axes: Axes) -> Shaped[Array, "rows all_columns"]:
    """From 'all rows, my columns' to 'my rows, all columns'."""
    return lax.all_to_all(x, names(axes), split_axis=0, concat_axis=1, tiled=True) if axes else x
