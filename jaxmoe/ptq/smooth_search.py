"""How much of an expert's difficulty moves into its down projection: tried out, through the operator that serves.

Hidden channels belong to one expert, so that each may choose for itself. What counts is the error of the projection's
outputs on the expert's own tokens, with rounded weights and with activations rounded per token.
"""

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int8

from jaxmoe.ops.linear import linear
from jaxmoe.ptq.rounding import NearestOptions, round_weight
from jaxmoe.ptq.rounding.ssz import SszOptions
from jaxmoe.ptq.smooth import column_max, exponents
from jaxmoe.quant.scheme import Scheme

SHARES: Final = (0.2, 0.35, 0.5, 0.65, 0.8)
"""What is tried, beside not smoothing at all; a tie goes to the one that changes least."""


def search_exponents(
    hidden: np.ndarray, absmax: np.ndarray, down: np.ndarray, scheme: Scheme, device: Any
) -> np.ndarray:
    """[ffn] int8: the exponents of the hidden channels with the least output error.

    Args:
        hidden: [rows, ffn] float32: some of what the projection is fed; rows of zeros count for nothing.
        absmax: [ffn]: largest magnitude of each channel over all tokens.
        down: [embed, ffn] float32.
        scheme: how the projection is stored; the search rounds to nearest, or by importance with 4 bits.
        device: where to run.
    """
    tops = column_max(down)
    tried = np.stack([np.zeros(len(absmax), np.int8), *(exponents(absmax, tops, share) for share in SHARES)])
    errors = np.asarray(_errors(*jax.device_put((hidden, down, tried), device), scheme))
    finite = np.where(np.isfinite(errors), errors, np.inf)
    return tried[int(np.argmin(finite))]


@partial(jax.jit, static_argnums=3)
def _errors(
    hidden: Float32[Array, "rows ffn"],
    down: Float32[Array, "embed ffn"],
    tried: Int8[Array, "tries ffn"],
    scheme: Scheme,
) -> Float32[Array, " tries"]:
    exact = linear(hidden, down)

    def error(chosen: jax.Array) -> jax.Array:
        factor = jnp.exp2(chosen.astype(jnp.float32))[None, :]
        given = hidden / factor
        if scheme.weight_bits == 4:
            importance = jnp.mean(jnp.square(given), axis=0)
            weight, _ = round_weight(down * factor, importance, scheme, SszOptions())
        else:
            weight, _ = round_weight(down * factor, None, scheme, NearestOptions())
        return jnp.sum(jnp.square(linear(given, weight) - exact))

    return lax.map(error, tried)
