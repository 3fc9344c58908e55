"""Runs one decoder layer in float on calibration samples, with the very blocks that serve, and watches its inputs.

One layer's weights are in memory at a time. A sample runs alone, in one shape, so that its numbers do not depend on
which device runs it or on the other samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxmoe.models.manifest import Manifest, stack_of_layer
from jaxmoe.nn.block import Block, State
from jaxmoe.nn.cache import cache_tables
from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.nn.indexer import Indexer
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.rotary import rope_tables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.experts import Activation
from jaxmoe.ops.experts.xla import tile_rows
from jaxmoe.ops.pages import abstract_pages
from jaxmoe.parallel.exchange import ParallelContext
from jaxmoe.ptq.statistics import ChannelStats, channel_stats
from jaxmoe.ptq.taps import with_taps
from jaxmoe.weights.cells import Source, cell_axes, cell_shape, hub_cells

_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample on its way through the layers."""

    x: np.ndarray
    """[width, embed] or [width, streams, embed]: residual stream before the layer; rows past `length` mean nothing."""
    length: int
    selected: np.ndarray | None
    """Keys that the last indexer chose; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerObservation:
    """What a layer's linear layers were fed, over all samples."""

    inputs: dict[str, ChannelStats]
    """Tap name -> statistics."""
    expert_inputs: ChannelStats | None
    """[experts, embed]: of the rows routed to each expert; None: a dense layer."""
    expert_hidden: ChannelStats | None
    """[experts, expert_ffn]: of what each expert's down projection is fed."""


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


def load_layer(source: Source, manifest: Manifest, layer: int) -> dict[str, np.ndarray]:
    """Path without its stack -> [1, ...] float32 of one layer; 'indexer.*' where the layer has one of its own."""
    stack, position = stack_of_layer(manifest.config, layer)
    places = {stack: position}
    attention = manifest.config.attention
    if not isinstance(attention, AttentionConfig) and attention.indexer is not None:
        if layer in attention.indexer.full_layers:
            places["indexer"] = attention.indexer.full_layers.index(layer)
    weights: dict[str, np.ndarray] = {}
    for entry in manifest.entries:
        prefix, _, rest = entry.path.partition(".")
        if prefix not in places:
            continue
        array = np.empty((1, *entry.shape[1:]), np.float32)
        whole = tuple(slice(0, size) for size in cell_shape(entry))
        for cell in hub_cells(entry):
            if cell.position[0] == places[prefix]:
                array[(0, *cell.position[1:])] = source.read(entry, cell, whole)
        assert cell_axes(entry) in (1, 2)
        weights[rest if prefix == stack else entry.path] = array
    return weights


class LayerRunner:
    """One layer on some devices: the same weights on each, samples taken in turn."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: dict[str, np.ndarray], width: int, devices: Sequence[Any]
    ):
        """Puts the weights on every device.

        Args:
            config: the whole model.
            layer: number of the layer.
            weights: from `load_layer`.
            width: tokens of a sample, padding included.
            devices: where to run.
        """
        self._one = layer_config(config, layer)
        self._width = width
        self._devices = tuple(devices)
        self._weights = [jax.device_put(weights, device) for device in devices]

    def run(self, samples: Sequence[Sample]) -> tuple[list[Sample], LayerObservation, np.ndarray | None]:
        """The samples after the layer, what was observed, and tokens of each expert (None: a dense layer)."""
        pending = [
            _run_sample(self._one, self._width, self._weights[index % len(self._devices)], *self._placed(sample, index))
            for index, sample in enumerate(samples)
        ]
        after, taps, routed = [], [], []
        for sample, (x, selected, stats, experts) in zip(samples, pending, strict=True):
            chosen = None if selected is None else np.asarray(selected)
            after.append(Sample(x=np.asarray(x), length=sample.length, selected=chosen))
            taps.append({name: _stats(*values) for name, values in stats.items()})
            if experts is not None:
                routed.append(tuple(_stats(*values) for values in experts))
        inputs = {name: ChannelStats.merge_all(tap[name] for tap in taps) for name in taps[0]}
        if not routed:
            return after, LayerObservation(inputs=inputs, expert_inputs=None, expert_hidden=None), None
        fed, hidden = (ChannelStats.merge_all(pair[side] for pair in routed) for side in (0, 1))
        return after, LayerObservation(inputs=inputs, expert_inputs=fed, expert_hidden=hidden), fed.count

    def _placed(self, sample: Sample, index: int) -> tuple[Any, ...]:
        arrays = (sample.x, np.int32(sample.length), sample.selected)
        return jax.device_put(arrays, self._devices[index % len(self._devices)])


def _stats(absmax: jax.Array, squares: jax.Array, count: jax.Array) -> ChannelStats:
    return ChannelStats(absmax=np.asarray(absmax), squares=np.asarray(squares), count=np.asarray(count))


def first_choice(config: DecoderConfig, width: int) -> np.ndarray | None:
    """What an indexer's predecessor hands the first layer; None: every sample is shorter than what may be chosen."""
    attention = config.attention
    if isinstance(attention, AttentionConfig) or attention.indexer is None or width <= attention.indexer.top_k:
        return None
    return np.full((1, width, attention.indexer.top_k), -1, np.int32)


@partial(jax.jit, static_argnums=(0, 1))
def _run_sample(
    config: DecoderConfig,
    width: int,
    weights: dict[str, jax.Array],
    x: jax.Array,
    length: jax.Array,
    selected: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, dict[str, Any], Any]:
    """Residual stream, choice of keys, statistics of taps, statistics of experts, of one sample."""
    count = jnp.arange(width, dtype=jnp.int32)
    real = count < length
    layout, parallel = Layout(rows=1, chunk=width), ParallelContext()
    pages_needed = -(-width // _PAGE)
    specs = [replace(spec, layers=max(1, spec.layers)) for spec in cache_tables(config)]
    pages = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        abstract_pages(specs, pages=1 + pages_needed, page_size=_PAGE, dtype="float32"),
    )
    batch = StepBatch(
        token_ids=jnp.zeros(width, jnp.int32),
        positions=jnp.where(real, count, -1),
        page_ids=jnp.where(real, 1 + count // _PAGE, 1 + pages_needed),
        slots=count % _PAGE,
        page_table=1 + jnp.arange(pages_needed, dtype=jnp.int32)[None],
        zero_pages=jnp.zeros(0, jnp.int32),
        last_token=jnp.zeros(1, jnp.int32),
    )

    def layer(weights: dict[str, jax.Array], state: State) -> tuple[State, jax.Array | None]:
        block = _bound(
            lambda: Block(config, layers=1, moe=not config.dense_layers),
            {path: array for path, array in weights.items() if not path.startswith("indexer.")},
        )
        own = {path.removeprefix("indexer."): a for path, a in weights.items() if path.startswith("indexer.")}
        indexer = _bound(lambda: Indexer(config, ParamFactory(layers=1)), own) if own else None
        rope = rope_tables(config.attention.rope, batch.positions)
        first = jnp.int32(0)
        return block(state, batch, rope, indexer, layer=first, first_layer=0, layout=layout, parallel=parallel)

    (state, ids), taps = with_taps(layer)(weights, State(x=x, pages=pages, selected=selected))
    stats = {name: channel_stats(value, real) for name, value in taps.items()}
    experts = None if ids is None else _expert_stats(config, weights, taps["ffn.in"], ids, real)
    return state.x, state.selected, stats, experts


def _bound(build: Any, weights: dict[str, jax.Array]) -> Any:
    graphdef = nnx.split(nnx.eval_shape(build))[0]
    return nnx.merge(
        graphdef, nnx.from_flat_state([(tuple(path.split(".")), nnx.Param(array)) for path, array in weights.items()])
    )


def _expert_stats(
    config: DecoderConfig, weights: dict[str, jax.Array], x: jax.Array, ids: jax.Array, real: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Of the rows routed to each expert: statistics of the rows, and of the hidden vectors that they become.

    Walks the sorted (token, expert) pairs in tiles of one expert each, as `ops.experts` does.
    """
    tokens, top_k = ids.shape
    num_experts, ffn = weights["ffn.gate"].shape[1:3]
    activation = Activation(kind=config.moe.activation, limit=config.moe.limit)
    biases = [weights.get(f"ffn.{name}_bias") for name in ("gate", "up")]
    tile = tile_rows(tokens, top_k, num_experts)
    flat = jnp.where(real[:, None], ids, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[flat].add(1)[:num_experts]
    first_row = jnp.cumsum(counts) - counts
    tiles = -(-counts // tile)
    last_tile = jnp.cumsum(tiles)
    first_tile = last_tile - tiles

    def project(rows: jax.Array, name: str, bias: jax.Array | None, expert: jax.Array) -> jax.Array:
        weight = weights[f"ffn.{name}"][0, expert]
        out = lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        return out if bias is None else out + bias[0, expert][None, :]

    def body(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        expert = jnp.searchsorted(last_tile, index, side="right").astype(jnp.int32)
        offset = (index - first_tile[expert]) * tile + jnp.arange(tile, dtype=jnp.int32)
        here = offset < counts[expert]
        pair = order[jnp.where(here, first_row[expert] + offset, 0)]
        rows = x[pair // top_k].astype(jnp.float32)
        hidden = activation(project(rows, "gate", biases[0], expert), project(rows, "up", biases[1], expert))
        (x_max, x_sum, _), (h_max, h_sum, _) = channel_stats(rows, here), channel_stats(hidden, here)
        return (
            sums[0].at[expert].max(x_max),
            sums[1].at[expert].add(x_sum),
            sums[2].at[expert].max(h_max),
            sums[3].at[expert].add(h_sum),
        )

    def zeros(size: int) -> jax.Array:
        return jnp.zeros((num_experts, size), jnp.float32)

    width = x.shape[-1]
    sums = lax.fori_loop(0, last_tile[-1], body, (zeros(width), zeros(width), zeros(ffn), zeros(ffn)))
    return (sums[0], sums[1], counts), (sums[2], sums[3], counts)


def embed_samples(
    source: Source, manifest: Manifest, token_ids: np.ndarray, lengths: Sequence[int]
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
        rows = np.zeros((len(ids), config.embed), np.float32)
        for row, token in enumerate(ids[:length]):
            rows[row] = source.read(entry, cell, (slice(int(token), int(token) + 1), slice(0, config.embed)))[0]
        if config.hyper is not None:
            rows = np.repeat(rows[:, None, :], config.hyper.streams, axis=1)
        yield Sample(x=rows, length=int(length), selected=choice)
