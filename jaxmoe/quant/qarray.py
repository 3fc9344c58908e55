"""QArray: a quantised weight as a pytree of integer values and scales."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.errors import WeightsError
from jaxmoe.quant.int8 import expand_groups, quantize_groups
from jaxmoe.quant.scheme import Scheme


@partial(jax.tree_util.register_dataclass, data_fields=["qvalue", "scale"], meta_fields=["scheme"])
@dataclass(frozen=True, slots=True, kw_only=True)
class QArray:
    """A weight [..., out, in] on a symmetric integer grid.

    Invariants (shapes and dtypes: `validate_shapes`; pytree operations may hold other leaves for a while):
        qvalue.dtype == int8, scale.dtype == float32
        qvalue.shape == (*lead, out, in), scale.shape == (*lead, out, ceil(in / group))
        original[..., o, i] ~ qvalue[..., o, i] * scale[..., o, i // group]
        scale > 0 and finite; abs(qvalue) <= 127
    """

    qvalue: Any
    scale: Any
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight it stands for."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the weight it stands for."""
        return len(self.qvalue.shape)

    @property
    def dtype(self) -> Any:
        """Storage dtype of the integer values."""
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

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The float weight this stands for, `qvalue * scale` in float32, then cast."""
        scale = expand_groups(self.scale, self.group, self.shape[-1])
        return (self.qvalue.astype(jnp.float32) * scale).astype(dtype)


Weight = jax.Array | QArray
"""What a model holds for a parameter: operators take either."""


def quantize_weight(weight: jax.Array, scheme: Scheme) -> QArray:
    """Rounds a float weight [..., out, in] to nearest."""
    q, scale = quantize_groups(weight, scheme.group_size(weight.shape[-1]))
    return QArray(qvalue=q, scale=scale, scheme=scheme)


def validate_shapes(array: QArray, *, name: str) -> None:
    """Checks dtypes and shapes of a QArray, abstract or real.

    Raises:
        WeightsError: an invariant does not hold; the tensor and both values are named.
    """
    expected = (*array.shape[:-1], array.scheme.num_groups(array.shape[-1]))
    if tuple(array.scale.shape) != expected:
        raise WeightsError(
            f"{name}: scales have shape {tuple(array.scale.shape)}, a weight of shape {tuple(array.shape)} in groups "
            f"of {array.group} needs {expected}"
        )
    if array.qvalue.dtype != jnp.int8 or array.scale.dtype != jnp.float32:
        raise WeightsError(
            f"{name}: stored as {array.qvalue.dtype} with {array.scale.dtype} scales, expected int8 with float32 scales"
        )
