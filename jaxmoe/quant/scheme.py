"""A quantisation scheme and its name, such as 'w8a8-g128'."""

import re
from dataclasses import dataclass
from typing import Literal

from jaxmoe.errors import RecipeError

_NAME = re.compile(r"w8a(8|16)-(?:g(\d+)|channel)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a weight [..., out, in] and the activations that meet it are stored and multiplied.

    Invariants (checked on construction): `weight_bits == 8`; `activation_bits` is 8 or 16; `group is None` (one scale
    per output channel) or `group >= 1`.
    """

    weight_bits: Literal[8] = 8
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
        if self.weight_bits != 8 or self.activation_bits not in (8, 16) or (self.group is not None and self.group < 1):
            raise RecipeError(
                f"no scheme has weight_bits={self.weight_bits}, activation_bits={self.activation_bits}, "
                f"group={self.group}: weights have 8 bits, activations 8 or 16, a group at least one element"
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


def parse_scheme(text: str) -> Scheme:
    """The scheme with the name `text`.

    Raises:
        RecipeError: the text is no scheme, or its group size is not one of 32, 64, 128, 256.
    """
    match = _NAME.match(text)
    if match is None:
        raise RecipeError(
            f"unknown scheme {text!r}: use w8a8-g128 (INT8 weights, one scale per 128 inputs, INT8 activations per "
            "token), w8a16-g128 (weight only) or w8a8-channel; groups of 32, 64, 128 and 256 are allowed"
        )
    if match[2] not in (None, "32", "64", "128", "256"):
        raise RecipeError(f"scheme {text!r}: a group of {match[2]} is not one of 32, 64, 128, 256")
    group = None if match[2] is None else int(match[2])
    return Scheme(activation_bits=8 if match[1] == "8" else 16, group=group)
