"""QArray: a quantised weight as a pytree of integer values and scales."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.errors import WeightsError
from jaxmoe.quant.int4 import pack_pairs, unpack_group, unpack_pairs
from jaxmoe.quant.int8 import expand_groups, quantize_groups
from jaxmoe.quant.scheme import Scheme


@partial(jax.tree_util.register_dataclass, data_fields=["qvalue", "scale"], meta_fields=["scheme"])
@dataclass(frozen=True, slots=True, kw_only=True)
class QArray:
    """A weight [..., out, in] on a symmetric integer grid.

    Invariants (shapes and dtypes: `validate_shapes`; pytree operations may hold other leaves for a while):
        8 bits: qvalue.dtype == int8,  qvalue.shape == (*lead, out, in),     integers == qvalue
        4 bits: qvalue.dtype == uint8, qvalue.shape == (*lead, out, in / 2), integers == unpack_pairs(qvalue, group)
        scale.dtype == float32, scale.shape == (*lead, out, ceil(in / group))
        original[..., o, i] ~ integers[..., o, i] * scale[..., o, i // group]
        scale > 0 and finite; abs(integers) <= 127 or 7
    """

    qvalue: Any
    scale: Any
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight it stands for."""
        *lead, stored = self.qvalue.shape
        return (*lead, stored * 8 // self.scheme.weight_bits)

    @property
    def ndim(self) -> int:
        """Number of axes of the weight it stands for."""
        return len(self.qvalue.shape)

    @property
    def dtype(self) -> Any:
        """Storage dtype of the integer values; uint8 holds two."""
        return self.qvalue.dtype

    @property
    def group(self) -> int:
        """Input elements per scale; the last group may be shorter."""
        return self.scheme.group_size(self.shape[-1])

    def __getitem__(self, index: Any) -> "QArray":
        """Indexes any axis but the last, so that values and scales stay together.

        Raises:
            IndexError: the index reaches the input axis, whose groups it would tear apart.
        """
        if index is Ellipsis:
            return self
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) >= self.ndim or any(entry is Ellipsis for entry in entries):
            raise IndexError(f"the input axis of a QArray {list(self.shape)} cannot be indexed: {len(entries)} indices")
        return QArray(qvalue=self.qvalue[index], scale=self.scale[index], scheme=self.scheme)

    def integers(self) -> jax.Array:
        """The integer values [..., out, in] in INT8, whatever they are stored in."""
        return self.qvalue if self.scheme.weight_bits == 8 else unpack_pairs(self.qvalue, self.group)

    def group_integers(self, index: int) -> jax.Array:
        """The integer values [..., out, width] of one group of the input axis in INT8, the others untouched."""
        width = self.group * self.scheme.weight_bits // 8
        stored = self.qvalue[..., index * width : (index + 1) * width]
        return stored if self.scheme.weight_bits == 8 else unpack_group(stored)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The float weight this stands for, `integers * scale` in float32, then cast."""
        scale = expand_groups(self.scale, self.group, self.shape[-1])
        return (self.integers().astype(jnp.float32) * scale).astype(dtype)


Weight = jax.Array | QArray
"""What a model holds for a parameter: operators take either."""


def quantize_weight(weight: jax.Array, scheme: Scheme) -> QArray:
    """Rounds a float weight [..., out, in] to nearest.

    Raises:
        RecipeError: the scheme cannot store this shape.
    """
    scheme.values_shape(weight.shape)
    group = scheme.group_size(weight.shape[-1])
    q, scale = quantize_groups(weight, group, scheme.weight_bits)
    return QArray(qvalue=q if scheme.weight_bits == 8 else pack_pairs(q, group), scale=scale, scheme=scheme)


def validate_shapes(array: QArray, *, name: str) -> None:
    """Checks dtypes and shapes of a QArray, abstract or real.

    Raises:
        WeightsError: an invariant does not hold; the tensor and both values are named.
    """
    stored = array.scheme.values_dtype
    if array.qvalue.dtype != stored or array.scale.dtype != jnp.float32:
        raise WeightsError(
            f"{name}: stored as {array.qvalue.dtype} with {array.scale.dtype} scales, expected {stored} with float32 "
            "scales"
        )
    expected = array.scheme.scales_shape(array.shape)
    if tuple(array.scale.shape) != expected:
        raise WeightsError(
            f"{name}: scales have shape {tuple(array.scale.shape)}, a weight of shape {tuple(array.shape)} in groups "
            f"of {array.group} needs {expected}"
        )
