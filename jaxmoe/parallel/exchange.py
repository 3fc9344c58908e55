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
    """Mesh axes that split each kind of work; static under jit.

    Rows of a step are split over `token_axes` and equal on all devices along `head_axes`.
    """

    token_axes: Axes = ()
    expert_axes: Axes = ()
    vocab_axes: Axes = ()
    head_axes: Axes = ()

    @classmethod
    def from_plan(cls, plan: Plan) -> "ParallelContext":
        """The context of a plan."""

        def axes(name: str) -> Axes:
            return tuple((axis, plan.mesh[axis]) for axis in plan.rules.get(name, ()) if plan.mesh[axis] > 1)

        return cls(
            token_axes=axes("tokens"), expert_axes=axes("experts"), vocab_axes=axes("vocab"), head_axes=axes("heads")
        )

    def placement(self, num_experts: int) -> ExpertPlacement:
        """Where the routed experts live."""
        return ExpertPlacement(num_experts=num_experts, num_ranks=num_ranks(self.expert_axes))

    def split_rows(self, axes: Axes) -> Axes:
        """Those of the axes that rows are split over."""
        return tuple(axis for axis in axes if axis in self.token_axes)

    def same_rows(self, axes: Axes) -> Axes:
        """Those of the axes along which all devices have the same rows."""
        return tuple(axis for axis in axes if axis not in self.token_axes)

    def gather_rows(self, x: Shaped[Array, "rows *rest"], axes: Axes) -> Shaped[Array, "all_rows *rest"]:
        """Rows of all devices along the axes, in rank order."""
        return gather_rows(x, self.split_rows(axes))

    def reduce_rows(self, x: Float[Array, "all_rows *rest"], axes: Axes) -> Float[Array, "rows *rest"]:
        """Sums over the devices along the axes and keeps this device's rows; undoes `gather_rows`."""
        same = self.same_rows(axes)
        x = lax.psum(x, names(same)) if same else x
        return reduce_rows(x, self.split_rows(axes))

    def columns_to_rows(self, x: Shaped[Array, "all_rows part"], axes: Axes) -> Shaped[Array, "rows all_columns"]:
        """From 'rows of all devices along the axes, my columns' to 'my rows, all columns', columns in rank order."""
        split, same = self.split_rows(axes), self.same_rows(axes)
        x = columns_to_rows(gather_columns(x, same), split)
        arrived = split + same
        if axes == arrived:
            return x
        # Columns arrived by rank along the split axes first; rank order is that of all axes together.
        parts = x.reshape(x.shape[0], *(size for _, size in arrived), -1)
        order = [1 + arrived.index(axis) for axis in axes]
        return parts.transpose(0, *order, len(arrived) + 1).reshape(x.shape)


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


def gather_columns(x: Shaped[Array, "rows part"], axes: Axes) -> Shaped[Array, "rows all_columns"]:
    """Columns of all devices along the axes, in rank order."""
    return lax.all_gather(x, names(axes), axis=1, tiled=True) if axes else x
