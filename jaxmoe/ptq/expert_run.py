"""Runs one routed expert in float on the tokens that chose it, and watches what its projections are fed."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.ops.experts import Activation
from jaxmoe.ops.linear import linear
from jaxmoe.ptq.statistics import InputStats, input_stats

TILE_ROWS = 256
"""Rows of a program; of fixed size, so that a token's numbers do not depend on how many came with it."""

_TILES_IN_FLIGHT = 4
"""The host gathers rows while the device works; more would only hold memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPass:
    """What one expert did with its tokens."""

    inputs: InputStats
    """Of the tokens."""
    hidden: InputStats
    """Of what the down projection is fed."""
    finite: bool
    """Whether all outputs are."""


def run_expert(
    weights: Mapping[str, np.ndarray],
    rows: Any,
    *,
    activation: Activation,
    grams: frozenset[str],
    device: Any,
    out: np.ndarray | None = None,
) -> ExpertPass:
    """All tokens of one expert, tile by tile: a few tiles are in memory at a time.

    Args:
        weights: gate, up [expert_ffn, embed], down [embed, expert_ffn] in float32; gate_bias, up_bias, down_bias if
            the model has them.
        rows: [tokens, embed] float32: an array, or what reads a slice of it when asked (it has a length too).
        activation: between the projections.
        grams: 'inputs' and 'hidden', where Gram matrices are wanted.
        device: where to run.
        out: [tokens, embed] float32 to be filled; None: nobody wants to see what it makes of the tokens.
    """
    placed = jax.device_put(dict(weights), device)
    ffn, embed = weights["gate"].shape
    sums = jax.device_put(
        {"inputs": _nothing(embed, "inputs" in grams), "hidden": _nothing(ffn, "hidden" in grams)}, device
    )
    finite = True
    running: deque[tuple[int, int, jax.Array]] = deque()
    for start in range(0, len(rows), TILE_ROWS):
        part = rows[start : start + TILE_ROWS]
        tile = np.zeros((TILE_ROWS, embed), np.float32)
        tile[: len(part)] = part
        result, sums = _tile(activation, placed, *jax.device_put((tile, np.int32(len(part))), device), sums)
        running.append((start, len(part), result))
        if len(running) == _TILES_IN_FLIGHT:
            finite &= _fetch(running, out)
    while running:
        finite &= _fetch(running, out)
    return ExpertPass(inputs=sums["inputs"].widened(), hidden=sums["hidden"].widened(), finite=finite)


def hidden_of(weights: Mapping[str, np.ndarray], rows: Any, *, activation: Activation, device: Any) -> np.ndarray:
    """[TILE_ROWS, expert_ffn] float32: what the down projection is fed at evenly spaced tokens; zeros behind them.

    Args: see `run_expert`.
    """
    places = np.linspace(0, len(rows) - 1, min(len(rows), TILE_ROWS)).astype(np.int64).tolist()
    tile = np.zeros((TILE_ROWS, weights["gate"].shape[1]), np.float32)
    for index, place in enumerate(places):
        tile[index] = rows[place : place + 1][0]
    placed = jax.device_put(({name: array for name, array in weights.items() if name[:4] != "down"}, tile), device)
    hidden = np.array(_hidden(activation, *placed))
    hidden[len(places) :] = 0
    return hidden


@partial(jax.jit, static_argnums=0)
def _hidden(activation: Activation, weights: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    gate = linear(rows, weights["gate"], bias=weights.get("gate_bias"))
    return activation(gate, linear(rows, weights["up"], bias=weights.get("up_bias")))


def _fetch(running: "deque[tuple[int, int, jax.Array]]", out: np.ndarray | None) -> bool:
    """Takes the oldest tile's result; whether it is finite."""
    start, count, result = running.popleft()
    part = np.asarray(result)[:count]
    if out is not None:
        out[start : start + count] = part
    return bool(np.isfinite(part).all())


def _nothing(channels: int, gram: bool) -> InputStats:
    return InputStats(
        absmax=np.zeros(channels, np.float32),
        squares=np.zeros(channels, np.float32),
        count=np.int32(0),
        gram=np.zeros((channels, channels), np.float32) if gram else None,
    )


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _tile(
    activation: Activation,
    weights: dict[str, jax.Array],
    rows: jax.Array,
    count: jax.Array,
    sums: dict[str, InputStats],
) -> tuple[jax.Array, dict[str, InputStats]]:
    hidden = _hidden(activation, weights, rows)
    out = linear(hidden, weights["down"], bias=weights.get("down_bias"))
    real = jnp.arange(rows.shape[0], dtype=jnp.int32) < count
    seen = {"inputs": rows, "hidden": hidden}
    return out, {
        name: _added(sums[name], input_stats(x, real, gram=sums[name].gram is not None)) for name, x in seen.items()
    }


def _added(total: InputStats, part: InputStats) -> InputStats:
    return InputStats(
        absmax=jnp.maximum(total.absmax, part.absmax),
        squares=total.squares + part.squares,
        count=total.count + part.count,
        gram=None if total.gram is None else total.gram + part.gram,
    )
