"""How well calibration reached the experts: tokens that each of them was given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

_COLDEST = 8
"""Experts that are named: with a line before and one after, a text of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdExpert:
    """An expert and the tokens that were routed to it."""

    layer: int
    """The model's number of the layer."""
    expert: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Tokens per expert, over all experts of all mixture-of-experts layers.

    share_below = below / experts; min_tokens <= median_tokens; coldest is in ascending order of tokens.
    """

    layers: int
    experts: int
    """Of all layers together."""
    tokens: int
    """Sum over experts: each token counts once for every expert that it was given to."""
    min_tokens: int
    median_tokens: float
    threshold_tokens: int
    below: int
    """Experts with fewer tokens than the threshold."""
    share_below: float
    coldest: tuple[ColdExpert, ...]

    @property
    def enough(self) -> bool:
        """Whether every expert has its minimum."""
        return self.below == 0

    def text(self) -> str:
        """At most ten lines: the numbers, then the coldest experts."""
        lines = [
            f"{self.experts} experts in {self.layers} layers: minimum {self.min_tokens} tokens, "
            f"median {self.median_tokens:g}; {self.below} ({self.share_below:.1%}) have fewer than "
            f"{self.threshold_tokens}"
        ]
        lines += [f"  layer {cold.layer} expert {cold.expert}: {cold.tokens} tokens" for cold in self.coldest]
        if self.below > len(self.coldest):
            lines.append(f"  and {self.below - len(self.coldest)} more")
        return "\n".join(lines)


def measure_coverage(
    counts: Integer[np.ndarray, "moe_layers experts"], *, layers: Sequence[int], threshold_tokens: int
) -> Coverage:
    """Coverage of the experts.

    Args:
        counts: tokens per expert.
        layers: the model's number of each row (the first layers of a model may be dense).
        threshold_tokens: the minimum that every expert should have.
    """
    assert counts.size and (counts >= 0).all() and len(layers) == len(counts)
    flat = counts.reshape(-1)
    below = int((flat < threshold_tokens).sum())
    # Stable: among equals the first layer and the first expert come first.
    order = np.argsort(flat, kind="stable")[:_COLDEST]
    rows, columns = np.divmod(order, counts.shape[1])
    return Coverage(
        layers=counts.shape[0],
        experts=counts.size,
        tokens=int(flat.sum(dtype=np.int64)),
        min_tokens=int(flat.min()),
        median_tokens=float(np.median(flat)),
        threshold_tokens=threshold_tokens,
        below=below,
        share_below=below / counts.size,
        coldest=tuple(
            ColdExpert(layer=layers[row], expert=int(column), tokens=int(counts[row, column]))
            for row, column in zip(rows, columns, strict=True)
        ),
    )
