"""The manifest: every parameter's path, shape, axes, role and hub names. Nothing is allocated.

Planner, sharding, recipes, loader and exporter read this one table.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
from flax import nnx

from jaxmoe.models.family import Family, expand
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter.

    Invariant: `shape` and `axes` are logical: all layers, all experts, the whole vocabulary.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    role: str
    float32: bool
    """Kept in float32 whatever the model's dtype."""
    hub: str
    """Template of hub tensor names."""
    layers: range
    """Hub layer numbers of the leading axis; empty when the parameter has none."""

    @property
    def lead(self) -> int:
        """Leading axes that the template spreads over tensors: 0, 1 (layers) or 2 (layers and experts)."""
        return ("{layer}" in self.hub) + ("{expert}" in self.hub)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one hub tensor."""
        return self.shape[self.lead :]

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """(index of the leading axes, hub tensor name) for all tensors of this parameter."""
        experts = self.shape[1] if self.lead == 2 else 0
        return expand(self.hub, self.layers, experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All parameters of a model, in a fixed order, and the graph that holds them."""

    config: DecoderConfig
    graphdef: nnx.GraphDef
    entries: tuple[Entry, ...]

    def __getitem__(self, path: str) -> Entry:
        """The entry of a path."""
        return next(entry for entry in self.entries if entry.path == path)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        total = 0
        for entry in self.entries:
            count = 1
            for size in entry.shape:
                count *= size
            total += count
        return total


def build_manifest(family: Family, config: DecoderConfig) -> Manifest:
    """The manifest of a model; takes milliseconds at any size."""
    model = nnx.eval_shape(lambda: Decoder(config))
    graphdef, state = nnx.split(model)
    rules = {rule.path: rule for rule in family.tensors}
    entries = []
    for path, variable in sorted(nnx.to_flat_state(state), key=lambda item: tuple(map(str, item[0]))):
        name = ".".join(map(str, path))
        abstract: jax.ShapeDtypeStruct = variable.get_value()
        metadata = variable.get_metadata()
        first = config.dense_layers if name.startswith("moe.") else 0
        count = abstract.shape[0] if metadata["axes"][0] == "layers" else 0
        entries.append(
            Entry(
                path=name,
                shape=tuple(abstract.shape),
                axes=metadata["axes"],
                role=metadata["role"],
                float32=metadata["float32"],
                hub=rules[name].hub,
                layers=range(first, first + count),
            )
        )
    return Manifest(config=config, graphdef=graphdef, entries=tuple(entries))
