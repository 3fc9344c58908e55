"""Runs one decoder layer in float on calibration samples, with the very blocks that serve, and watches its inputs.

All but the routed experts: those are other programs (`expert_run`), so that no device ever holds more than one of them.
A sample runs alone, in one shape, so that its numbers do not depend on which device runs it or on the other samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.models.manifest import Manifest, stack_of_layer
from jaxmoe.nn.block import HalfState
from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.ptq.layer_forward import forward_layer
from jaxmoe.ptq.rotation.source import RotatedSource
from jaxmoe.ptq.statistics import InputStats, input_stats
from jaxmoe.weights.cells import Source, cell_axes, cell_shape, hub_cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample on its way through the layers."""

    x: np.ndarray
    """[tokens, embed] or [tokens, streams, embed] float32: residual stream before the layer."""
    selected: np.ndarray | None
    """[1, width, k] int32: keys that the last indexer chose; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """A sample between the halves of a layer; only real tokens."""

    stream: np.ndarray
    """[tokens, embed] or [tokens, streams, embed]: after attention; of a dense layer, after the layer."""
    selected: np.ndarray | None
    gates: np.ndarray | None = None
    """[tokens, streams]: how the feed-forward's output enters the streams."""
    normed: np.ndarray | None = None
    """[tokens, embed]: what the feed-forward is fed; None: a dense layer, which is done."""
    ids: np.ndarray | None = None
    """[tokens, top_k] int32."""
    weights: np.ndarray | None = None
    """[tokens, top_k] float32."""
    shared: np.ndarray | None = None
    """[tokens, embed]: output of the shared expert, if there is one."""


def layer_config(config: DecoderConfig, layer: int) -> DecoderConfig:
    """A model of this one layer."""
    attention = config.attention
    if isinstance(attention, AttentionConfig):
        attention = replace(attention, windows=attention.windows[layer : layer + 1])
    elif attention.indexer is not None:
        own = (0,) if layer in attention.indexer.full_layers else ()
        attention = replace(attention, indexer=replace(attention.indexer, full_layers=own))
    dense = int(layer < config.dense_layers)
    return replace(config, layers=1, dense_layers=dense, mtp_layers=0, attention=attention)


def layer_place(config: DecoderConfig, layer: int) -> dict[str, int]:
    """Stack -> place in it, of all stacks that a layer has a part in."""
    stack, position = stack_of_layer(config, layer)
    places = {stack: position}
    attention = config.attention
    if not isinstance(attention, AttentionConfig) and attention.indexer is not None:
        if layer in attention.indexer.full_layers:
            places["indexer"] = attention.indexer.full_layers.index(layer)
    return places


def local_name(path: str) -> str:
    """A parameter's name within its layer: its path without the stack; 'indexer.*' stays."""
    stack, _, rest = path.partition(".")
    return path if stack == "indexer" else rest


def load_layer(source: Source | RotatedSource, manifest: Manifest, layer: int) -> dict[str, np.ndarray]:
    """Local name -> [1, ...] float32 of all but the routed experts of one layer."""
    places = layer_place(manifest.config, layer)
    weights: dict[str, np.ndarray] = {}
    for entry in manifest.entries:
        place = places.get(entry.path.partition(".")[0])
        if place is None or "experts" in entry.axes:
            continue
        assert cell_axes(entry) == 1, entry.path
        whole = tuple(slice(0, size) for size in cell_shape(entry))
        cell = next(cell for cell in hub_cells(entry) if cell.position == (place,))
        weights[local_name(entry.path)] = source.read(entry, cell, whole).astype(np.float32)[None]
    return weights


class LayerRunner:
    """One layer on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        weights: Mapping[str, np.ndarray],
        *,
        width: int,
        device: Any,
        grams: frozenset[str] = frozenset(),
    ):
        """Puts the weights on the device.

        Args:
            config: the whole model.
            layer: number of the layer.
            weights: from `load_layer`.
            width: tokens of a sample, padding included.
            device: where to run.
            grams: taps whose Gram matrices are wanted.
        """
        self._one = layer_config(config, layer)
        self._width = width
        self._device = device
        self._grams = grams
        self._weights = jax.device_put(dict(weights), device)

    @property
    def config(self) -> DecoderConfig:
        """A model of this one layer."""
        return self._one

    @property
    def width(self) -> int:
        """Tokens of a sample, padding included."""
        return self._width

    @property
    def weights(self) -> Mapping[str, jax.Array]:
        """On the device, named as `load_layer` does."""
        return self._weights

    def placed(self, sample: Sample) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """A sample on the device: its padded stream, its length, the last choice of keys."""
        x = np.zeros((self._width, *sample.x.shape[1:]), np.float32)
        x[: len(sample.x)] = sample.x
        return jax.device_put((x, np.int32(len(sample.x)), sample.selected), self._device)

    def attend(self, sample: Sample) -> tuple[Attended, dict[str, InputStats]]:
        """The first half of the layer, or all of a dense one; and what its linear layers were fed, by tap."""
        length, arguments = len(sample.x), self.placed(sample)
        results, selected, stats = _run_sample(self._one, self._width, self._grams, self._weights, *arguments)
        fields = {name: np.asarray(array)[:length] for name, array in results.items()}
        chosen = None if selected is None else np.asarray(selected)
        return Attended(selected=chosen, **fields), stats


def join_sample(attended: Attended, rows: np.ndarray, *, width: int, device: Any) -> np.ndarray:
    """The residual stream after a layer.

    Args:
        attended: the first half.
        rows: [tokens, top_k, embed] float32: what each chosen expert makes of each token.
        width: tokens of a sample, padding included.
        device: where to run.
    """
    arrays = (attended.stream, attended.gates, attended.shared, rows, attended.weights)
    padded = [_padded(array, width) for array in arrays]
    return np.asarray(_join(*jax.device_put(padded, device)))[: len(rows)]


def _padded(array: np.ndarray | None, width: int) -> np.ndarray | None:
    if array is None:
        return None
    result = np.zeros((width, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result


@jax.jit
def _join(
    stream: jax.Array, gates: jax.Array | None, shared: jax.Array | None, rows: jax.Array, weights: jax.Array
) -> jax.Array:
    """As `ops.experts` adds up: slots in order, then the shared expert."""
    total = jnp.zeros((rows.shape[0], rows.shape[-1]), jnp.float32)
    for slot in range(rows.shape[1]):
        total = total + rows[:, slot] * weights[:, slot, None]
    if shared is not None:
        total = total + shared.astype(jnp.float32)
    half = HalfState(stream=stream, gates=gates, pages={}, selected=None)
    return half.join(total.astype(stream.dtype))


def first_choice(config: DecoderConfig, width: int) -> np.ndarray | None:
    """What an indexer's predecessor hands the first layer; None: every sample is shorter than what may be chosen."""
    attention = config.attention
    if isinstance(attention, AttentionConfig) or attention.indexer is None or width <= attention.indexer.top_k:
        return None
    return np.full((1, width, attention.indexer.top_k), -1, np.int32)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run_sample(
    config: DecoderConfig,
    width: int,
    grams: frozenset[str],
    weights: dict[str, jax.Array],
    x: jax.Array,
    length: jax.Array,
    selected: jax.Array | None,
) -> tuple[dict[str, jax.Array], jax.Array | None, dict[str, InputStats]]:
    """Fields of `Attended` of one sample, its choice of keys, statistics of taps."""
    seen = forward_layer(config, width, dict(weights), x, length, selected)
    stats = {name: input_stats(value, seen.real, gram=name in grams) for name, value in seen.taps.items()}
    return seen.results, seen.selected, stats


def embed_samples(
    source: Source | RotatedSource, manifest: Manifest, token_ids: np.ndarray, lengths: Sequence[int]
) -> Iterator[Sample]:
    """The samples before the first layer.

    Args:
        source: the checkpoint.
        manifest: the model.
        token_ids: [samples, width] int32; entries past a sample's length are ignored.
        lengths: tokens of each sample.
    """
    config, entry = manifest.config, manifest["embed.weight"]
    cell = next(hub_cells(entry))
    choice = first_choice(config, token_ids.shape[1])
    for ids, length in zip(token_ids, lengths, strict=True):
        different, places = np.unique(ids[:length], return_inverse=True)
        rows = np.empty((len(different), config.embed), np.float32)
        for row, token in enumerate(different.tolist()):
            rows[row] = source.read(entry, cell, (slice(token, token + 1), slice(0, config.embed)))[0]
        x = rows[places]
        if config.hyper is not None:
            x = np.repeat(x[:, None, :], config.hyper.streams, axis=1)
        yield Sample(x=x, selected=choice)
