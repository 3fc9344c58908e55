"""The manifest: every parameter's path, shape, axes, role and hub names. Nothing is allocated.

Planner, sharding, recipes, loader and exporter read this one table.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import jax
from flax import nnx

from jaxmoe.models.family import Family, Hub, TensorRule, View, expand
from jaxmoe.nn.config import DecoderConfig, LatentAttentionConfig
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
    """Template of the checkpoint's tensor names."""
    own: str
    """Template of tensor names in our own checkpoints: the released ones, but a tensor for each expert."""
    view: View
    """The part of each tensor that is this parameter's; the whole, unless the checkpoint fuses parameters."""
    layers: tuple[int, ...]
    """Hub layer numbers of the leading axis; empty when the parameter has none."""

    @property
    def lead(self) -> int:
        """Leading axes that the template spreads over tensors: 0, 1 (layers) or 2 (layers and experts)."""
        return ("{layer}" in self.hub) + ("{expert}" in self.hub)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of this parameter's part of one hub tensor, [.., out, in]."""
        return self.shape[self.lead :]

    @property
    def row_axis(self) -> int:
        """The axis of outputs, which fused parameters share: of a bias its only one, of a matrix [.., out, in] not."""
        return -1 if self.role == "experts.bias" else -2

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one hub tensor, other parameters' parts included."""
        shape = list(self.part_shape)
        if self.view.parts > 1:
            shape[self.row_axis] *= self.view.parts
        if self.view.transposed:
            shape[-2:] = shape[:-3:-1]
        return (1, *shape) if self.view.unit_axis else tuple(shape)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in our own checkpoints."""
        return self.shape[("{layer}" in self.own) + ("{expert}" in self.own) :]

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """(index of the leading axes, hub tensor name) for all tensors of this parameter."""
        return expand(self.hub, self.layers, self._experts)

    def own_tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """`tensors` of our own checkpoints."""
        return expand(self.own, self.layers, self._experts)

    @property
    def _experts(self) -> int:
        return self.shape[1] if len(self.shape) > 1 and self.axes[1] == "experts" else 0


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
        return sum(math.prod(entry.shape) for entry in self.entries)


def build_manifest(family: Family, config: DecoderConfig, present: Collection[str] = ()) -> Manifest:
    """The manifest of a model; takes milliseconds at any size.

    Args:
        family: names.
        config: structure.
        present: tensor names of a checkpoint, which decide between the ways to name a parameter; without them, and
            for a parameter that has none of its tensors there, the released way.
    """
    model = nnx.eval_shape(lambda: Decoder(config))
    graphdef, state = nnx.split(model)
    rules = {rule.path: rule for rule in family.tensors}
    entries = []
    for path, variable in sorted(nnx.to_flat_state(state), key=lambda item: tuple(map(str, item[0]))):
        name = ".".join(map(str, path))
        abstract: jax.ShapeDtypeStruct = variable.get_value()
        metadata = variable.get_metadata()
        layers = stack_layers(family, config, name) if metadata["axes"][0] == "layers" else ()
        experts = abstract.shape[1] if metadata["axes"][1:2] == ("experts",) else 0
        hub = _choose_hub(rules[name], layers, experts, present)
        entries.append(
            Entry(
                path=name,
                shape=tuple(abstract.shape),
                axes=metadata["axes"],
                role=metadata["role"],
                float32=metadata["float32"],
                hub=hub.name,
                own=rules[name].own.name,
                view=hub.view,
                layers=layers,
            )
        )
    return Manifest(config=config, graphdef=graphdef, entries=tuple(entries))


def stack_layers(family: Family, config: DecoderConfig, path: str) -> tuple[int, ...]:
    """Hub layer numbers of the stack that a parameter is in."""
    stack = path.split(".")[0]
    if stack == "dense":
        return tuple(range(config.dense_layers))
    if stack == "moe":
        return tuple(range(config.dense_layers, config.layers))
    if stack == "mtp":
        first = config.layers if family.mtp_first is None else family.mtp_first
        return tuple(range(first, first + config.mtp_layers))
    assert stack == "indexer" and isinstance(config.attention, LatentAttentionConfig), path
    assert config.attention.indexer is not None, path
    return config.attention.indexer.full_layers


def stack_of_layer(config: DecoderConfig, layer: int) -> tuple[str, int]:
    """The stack that a layer's block is in, and its place there."""
    return ("dense", layer) if layer < config.dense_layers else ("moe", layer - config.dense_layers)


def _choose_hub(rule: TensorRule, layers: tuple[int, ...], experts: int, present: Collection[str]) -> Hub:
    for hub in rule.hubs:
        if any(tensor in present for _, tensor in expand(hub.name, layers, experts)):
            return hub
    return rule.hubs[0]
