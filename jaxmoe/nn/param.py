"""Parameters: a shape, the names of its axes, and the role that recipes and ledgers know it by."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from jaxmoe.axes import WEIGHT_AXES

Role = Literal[
    "embed",
    "head",
    "norm",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.o",
    "attention.q_a",
    "attention.q_b",
    "attention.kv_a",
    "attention.kv_b",
    "attention.gate",
    "attention.bias",
    "attention.norm",
    "attention.sinks",
    "indexer.q",
    "indexer.k",
    "indexer.weights",
    "indexer.norm",
    "router",
    "router.bias",
    "experts.gate",
    "experts.up",
    "experts.down",
    "experts.bias",
    "shared.gate",
    "shared.up",
    "shared.down",
    "ffn.gate",
    "ffn.up",
    "ffn.down",
    "hyper",
    "mtp.projection",
]
"""What a parameter does; quantisation recipes select by role, so no family can be missed by a name pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamFactory:
    """Declares parameters; inside a stack it prepends the layers axis.

    Values are zeros: models are only ever built under `nnx.eval_shape`, and the loader provides the leaves.
    """

    layers: int | None = None

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str, ...], role: Role, *, float32: bool = False
    ) -> nnx.Param:
        """A parameter.

        Args:
            shape: without the layers axis.
            axes: one name of `WEIGHT_AXES` per dimension.
            role: what it does.
            float32: kept in float32 whatever the model's dtype (router, correction bias).
        """
        assert len(shape) == len(axes) and all(axis in WEIGHT_AXES for axis in axes), (shape, axes)
        if self.layers is not None:
            shape, axes = (self.layers, *shape), ("layers", *axes)
        return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, role=role, float32=float32)
