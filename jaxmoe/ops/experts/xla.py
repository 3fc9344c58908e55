"""experts in plain XLA: (token, expert) pairs sorted by expert, walked in row tiles that each belong to one expert.

The loop's trip count is the number of tiles that hold work, so cost follows the routing, buffers are bounded by the
shapes, and nothing is dropped whatever the imbalance. `lax.ragged_dot` is not used: on CPU (and on NVIDIA, in the
releases read) it lowers to a dense masked product over all experts.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxmoe.ops.dispatch import Impl
from jaxmoe.ops.experts.activation import Activation
from jaxmoe.ops.linear.xla import apply, grouped_int8_dot
from jaxmoe.quant.int8 import quantize_slices
from jaxmoe.quant.qarray import QArray, Weight

_LARGEST_TILE = 256


def tile_rows(tokens: int, top_k: int, total_experts: int) -> int:
    """Rows of one tile: the mean load of an expert rounded up to a power of two, 2..256."""
    mean = max(2, -(-tokens * top_k // total_experts))
    return min(_LARGEST_TILE, 1 << (mean - 1).bit_length())


def expert_rows(
    x: Float[Array, "rows embed"],
    gate: Weight,
    up: Weight,
    down: Weight,
    *,
    activation: Activation,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None,
) -> Float32[Array, "rows embed"]:
    """One expert's weights (and biases [width]) applied to rows; x is quantised once for gate and up."""
    if (
        isinstance(gate, QArray)
        and isinstance(up, QArray)
        and gate.scheme.activation_bits == up.scheme.activation_bits == 8
    ):
        xq, sx = quantize_slices(x)
        gate_out, up_out = grouped_int8_dot(xq, gate) * sx[:, None], grouped_int8_dot(xq, up) * sx[:, None]
    else:
        gate_out, up_out = apply(x, gate), apply(x, up)
    if biases is None:
        return apply(activation(gate_out, up_out).astype(x.dtype), down)
    gate_bias, up_bias, down_bias = (bias.astype(jnp.float32)[None, :] for bias in biases)
    return apply(activation(gate_out + gate_bias, up_out + up_bias).astype(x.dtype), down) + down_bias


def _run(
    x: Float[Array, "tokens embed"],
    expert_ids: Int32[Array, "tokens top_k"],
    weights: Float32[Array, "tokens top_k"],
    gate: Weight,
    up: Weight,
    down: Weight,
    *,
    layer: jax.Array | int,
    total_experts: int,
    activation: Activation,
    biases: tuple[jax.Array, jax.Array, jax.Array] | None,
) -> Float32[Array, "tokens embed"]:
    tokens, top_k = expert_ids.shape
    num_local = gate.shape[1]
    tile = tile_rows(tokens, top_k, total_experts)
    local = (expert_ids >= 0) & (expert_ids < num_local)
    # Stable sort of the pairs by expert; pairs that are not here sort behind all others.
    flat = jnp.where(local, expert_ids, num_local).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.zeros(num_local + 1, jnp.int32).at[flat].add(1)[:num_local]
    first_row = jnp.cumsum(counts) - counts
    tiles = -(-counts // tile)
    last_tile = jnp.cumsum(tiles)
    first_tile = last_tile - tiles
    # A token's ids are distinct, so at most min(top_k, experts) of its pairs are here.
    most_pairs = tokens * min(top_k, num_local)
    buffer_rows = (most_pairs // tile + num_local) * tile

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_tile, index, side="right").astype(jnp.int32)
        offset = (index - first_tile[expert]) * tile + jnp.arange(tile, dtype=jnp.int32)
        pair = order[jnp.where(offset < counts[expert], first_row[expert] + offset, 0)]
        rows = expert_rows(
            x[pair // top_k],
            gate[layer, expert],
            up[layer, expert],
            down[layer, expert],
            activation=activation,
            biases=jax.tree.map(lambda bias: bias[layer, expert], biases),
        )
        return lax.dynamic_update_slice(out, rows, (index * tile, 0))

    tile_out = jnp.zeros((buffer_rows, x.shape[-1]), jnp.float32)
    tile_out = lax.fori_loop(0, last_tile[-1], body, tile_out)
    # Where each pair's result stands: its expert's first tile, then its rank among the expert's pairs.
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * top_k, dtype=jnp.int32))
    safe = jnp.minimum(flat, num_local - 1)
    position = jnp.where(flat < num_local, first_tile[safe] * tile + rank - first_row[safe], 0)
    position = position.reshape(tokens, top_k)
    total = jnp.zeros((tokens, x.shape[-1]), jnp.float32)
    for slot in range(top_k):
        term = tile_out[position[:, slot]] * weights[:, slot, None]
        total = total + jnp.where(local[:, slot, None], term, jnp.float32(0))
    return total


IMPL = Impl(name="xla", run=_run)
