"""Puts weights into the graph: swaps leaves, never modules."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxmoe.models.manifest import Manifest
from jaxmoe.nn.decoder import Decoder


def bind(manifest: Manifest, weights: Mapping[str, Any]) -> Decoder:
    """The model with the given leaves, Array or QArray; called while tracing the step."""
    state = nnx.from_flat_state(
        [(tuple(entry.path.split(".")), nnx.Param(weights[entry.path])) for entry in manifest.entries]
    )
    return nnx.merge(manifest.graphdef, state)
