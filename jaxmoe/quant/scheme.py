"""A quantisation scheme and its name, such as 'w8a8-g128'."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from jaxmoe.errors import RecipeError

GROUPS: Final = (32, 64, 128, 256)
"""Group sizes that a name may have."""

Bits = Literal[4, 8]
"""Width of a stored weight."""

_NAME = re.compile(r"w([48])a(8|16)-(?:g(\d+)|channel)\Z")
_INT8, _PAIRS = np.dtype(np.int8), np.dtype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a weight [..., out, in] and the activations that meet it are stored and multiplied.

    Invariants (checked on construction): `weight_bits` is 4 or 8; `activation_bits` is 8 or 16; `group is None`
    (one scale per output channel) or `group >= 1`, with 4 bits one of `GROUPS`.
    """

    weight_bits: Bits = 8
    """8: an INT8 number an element. 4: two elements in a byte, see quant.int4."""
    activation_bits: Literal[8, 16] = 8
    """8: activations are quantised per token to INT8 and the product accumulates in INT32. 16: activations stay float
    and the weight is dequantised before a float product (weight-only)."""
    group: int | None = 128
    """Input elements that share one scale; the last group may be shorter. None: the whole input axis."""

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
            RecipeError: one does not hold.
        """
        if (
            self.weight_bits not in (4, 8)
            or self.activation_bits not in (8, 16)
            or (self.group is not None and self.group < 1)
        ):
            raise RecipeError(
                f"no scheme has weight_bits={self.weight_bits}, activation_bits={self.activation_bits}, "
                f"group={self.group}: weights have 4 or 8 bits, activations 8 or 16, a group at least one element"
            )
        if self.weight_bits == 4 and self.group not in (None, *GROUPS):
            raise RecipeError(
                f"no scheme has weight_bits=4 with group={self.group}: 4-bit weights have one scale per "
                f"{_listed(GROUPS)} inputs or one a row"
            )

    @property
    def name(self) -> str:
        """The text form; `parse_scheme` inverts it."""
        suffix = "channel" if self.group is None else f"g{self.group}"
        return f"w{self.weight_bits}a{self.activation_bits}-{suffix}"

    def group_size(self, in_size: int) -> int:
        """Elements per scale for an input axis of `in_size` elements."""
        return in_size if self.group is None else min(self.group, in_size)

    def num_groups(self, in_size: int) -> int:
        """Scales per output row: `ceil(in_size / group)`."""
        return -(-in_size // self.group_size(in_size))

    @property
    def values_dtype(self) -> np.dtype:
        """Dtype of the stored integers: int8, or uint8 where one holds two of them."""
        return _INT8 if self.weight_bits == 8 else _PAIRS

    def values_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the stored integers of a weight [..., out, in], in elements of `values_dtype`.

        Raises:
            RecipeError: 4-bit values of an odd input axis, which do not fill their bytes.
        """
        if self.weight_bits == 8:
            return tuple(shape)
        if shape[-1] % 2:
            raise RecipeError(
                f"a weight of shape {tuple(shape)} cannot be stored as {self.name}: 4-bit values are stored in pairs "
                f"and its input axis of {shape[-1]} is odd; choose a scheme with 8-bit weights"
            )
        return (*shape[:-1], shape[-1] // 2)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the float32 scales of a weight [..., out, in]."""
        return (*shape[:-1], self.num_groups(shape[-1]))

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight [..., out, in], integers and scales, on disk and in memory.

        Raises:
            RecipeError: see `values_shape`.
        """
        return math.prod(self.values_shape(shape)) + 4 * math.prod(self.scales_shape(shape))


def parse_scheme(text: str) -> Scheme:
    """The scheme with the name `text`.

    Raises:
        RecipeError: the text is no scheme, or its group size is not one of 32, 64, 128, 256.
    """
    match = _NAME.match(text)
    if match is None:
        raise RecipeError(
            f"unknown scheme {text!r}: use w8a8-g128 (INT8 weights, one scale per 128 inputs, INT8 activations per "
            "token), w4a8-g128 (4-bit weights), w8a16-g128 or w4a16-g128 (weight only), or -channel instead of a group "
            "(one scale a row); groups of 32, 64, 128 and 256 are allowed"
        )
    if match[3] not in (None, *map(str, GROUPS)):
        raise RecipeError(f"scheme {text!r}: a group of {match[3]} is not one of {_listed(GROUPS, ', ')}")
    return Scheme(
        weight_bits=4 if match[1] == "4" else 8,
        activation_bits=8 if match[2] == "8" else 16,
        group=None if match[3] is None else int(match[3]),
    )


def _listed(values: Sequence[int], last: str = " or ") -> str:
    return f"{', '.join(map(str, values[:-1]))}{last}{values[-1]}"
