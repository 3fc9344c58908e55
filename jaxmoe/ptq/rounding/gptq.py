"""GPTQ: round input channel by input channel, and let the later ones make up for the errors of the earlier.

The textbook form keeps all later weights up to date with rows of an upper Cholesky factor of inverse(H). Here are the
same numbers from the factor of H itself: `H = (A + I) D (A + I)^T` with A strictly upper and D diagonal, one Cholesky
factorisation with both axes reversed and no inverse. For each block B of channels in ascending order
    target = w[:, B] + (w - scale * q)[:, before B] @ A[before B, B] @ V    where V = inverse(A[B, B] + I)
and inside it, for each channel k in ascending order
    q[:, k]        = nearest(target[:, k])
    target[:, j]  -= (target[:, k] - scale * q[:, k]) * V[k, j]             for j > k
which leaves `sum over k of D[k] * |target[:, k] - scale * q[:, k]|**2` as the error of the outputs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.rounding.slices import Rounded, one_by_one, split_groups
from jaxmoe.ptq.rounding.ssz import check_steps, ssz_slices
from jaxmoe.quant.int8 import expand_groups, quantize_groups, quantize_slices
from jaxmoe.quant.scheme import Bits

NEAREST: Final = -1
"""Status of a weight that was rounded to nearest because no damping made its Hessian positive definite."""

_CHANNEL_BLOCK = 128
"""Channels that are updated one by one before a matrix product carries their errors on, when a row has one scale."""
_RAISE = 10.0

ScaleRule = Literal["minmax", "ssz"]
Order = Literal["natural", "activity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqOptions:
    """Damping and scales."""

    damping: float = 0.01
    """What is added to the diagonal of H, as a fraction of the diagonal's mean."""
    most_damping: float = 1.0
    """Where the factorisation fails, damping is raised by factors of 10 up to this; then the weight is rounded to
    nearest."""
    scale: ScaleRule = "ssz"
    """Where the scale of a group comes from."""
    order: Order = "activity"
    """natural: channels one after the other, and a group's scale is made when its turn comes, with the errors before it
    carried on. activity: channels with the largest inputs first, while all others can still make up for their errors;
    scales are made of the weights as they were, and stay where the channels are."""
    steps: int = 50
    """Alternations of ssz at most."""

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            RecipeError: one does not hold.
        """
        check_steps("gptq", self.steps)
        if not 0 < self.damping <= self.most_damping:
            raise RecipeError(
                f"rounding gptq: damping = {self.damping} and most_damping = {self.most_damping}, but damping is "
                "positive and at most most_damping"
            )

    @property
    def dampings(self) -> tuple[float, ...]:
        """What is tried, in order."""
        tried = [self.damping]
        while tried[-1] * _RAISE <= self.most_damping * (1 + 1e-9):
            tried.append(tried[-1] * _RAISE)
        return tuple(tried)


def round_gptq(
    weight: Float[Array, "*lead out in"],
    hessian: Float32[Array, "*lead in in"],
    group: int,
    bits: Bits,
    options: GptqOptions,
) -> Rounded:
    """Rounds so that the error of `x @ w.T` is small for inputs x like those that `hessian` was made from.

    A channel that never was other than zero has no part in this and is rounded to nearest. The status is how many times
    damping was raised, or `NEAREST`. A Hessian that is not finite gives scale NaN in all groups; a group of weights
    that is not finite gives it in that group, and hands no error on.

    Args:
        weight: any float; computed in float32.
        hessian: sum (or mean: its size does not matter) of x x^T.
        group: input elements per scale.
        bits: of the grid.
        options: see there.

    Source: Frantar et al. 2022 (GPTQ); Chee et al. 2023 (QuIP), section 3 and theorem 6.
    """
    return one_by_one(partial(_gptq, group=group, bits=bits, options=options), weight, hessian)


def _gptq(weight: jax.Array, hessian: jax.Array, *, group: int, bits: Bits, options: GptqOptions) -> Rounded:
    weight = weight.astype(jnp.float32)
    if options.order == "activity":
        # Stable, so that equal channels stay in order; NaN goes last and is dealt with below.
        order = jnp.argsort(-jnp.diagonal(hessian), stable=True)
    else:
        order = jnp.arange(hessian.shape[0], dtype=jnp.int32)
    with jax.named_scope("factor"):
        feedback, pivots, tries, definite = _factor(hessian[order][:, order], options.dampings)
    with jax.named_scope("sweep"):
        size = weight.shape[-1]
        if options.order == "natural" and group < size:
            q, scale = _sweep(weight, feedback, pivots, None, group, bits=bits, options=options)
        else:
            if options.order == "activity":
                scale = _static_scales(weight, jnp.diagonal(hessian), group, bits, options)
            else:
                scale = _scales(weight, pivots, bits, options)[:, None]
            given = expand_groups(scale, group, size)[:, order]
            width = min(size, _CHANNEL_BLOCK)
            q, _ = _sweep(weight[:, order], feedback, pivots, given, width, bits=bits, options=options)
            q = jnp.zeros_like(q).at[:, order].set(q)
    plain_q, plain_scale = quantize_groups(weight, group, bits)
    known = jnp.all(jnp.isfinite(hessian))
    q = jnp.where(known, jnp.where(definite, q, plain_q), jnp.int8(0))
    scale = jnp.where(known, jnp.where(definite, scale, plain_scale), np.float32(np.nan))
    return Rounded(qvalue=q, scale=scale, status=jnp.where(definite, tries - 1, jnp.int32(NEAREST)))


def _factor(
    hessian: Float32[Array, "in in"], dampings: tuple[float, ...]
) -> tuple[Float32[Array, "in in"], Float32[Array, " in"], Int32[Array, ""], Bool[Array, ""]]:
    """A, D, how many dampings were tried, and whether the last made H positive definite (if not: A and D of I)."""
    reverse, identity = hessian[::-1, ::-1], jnp.eye(*hessian.shape, dtype=jnp.float32)
    amounts = jnp.asarray(dampings, jnp.float32) * jnp.mean(jnp.diagonal(hessian))

    def failed(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        tries, lower = state
        return (tries < len(dampings)) & ~jnp.all(jnp.isfinite(lower))

    def attempt(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tries, _ = state
        return tries + 1, jnp.linalg.cholesky(reverse + amounts[tries] * identity)

    tries, lower = lax.while_loop(failed, attempt, (jnp.int32(0), jnp.full_like(hessian, np.nan)))
    definite = jnp.all(jnp.isfinite(lower))
    upper = jnp.where(definite, lower[::-1, ::-1], identity)
    diagonal = jnp.diagonal(upper)
    return jnp.triu(upper / diagonal[None, :], 1), jnp.square(diagonal), tries, definite


def _sweep(
    weight: Float32[Array, "out in"],
    feedback: Float32[Array, "in in"],
    pivots: Float32[Array, " in"],
    scales: Float32[Array, "out in"] | None,
    width: int,
    *,
    bits: Bits,
    options: GptqOptions,
) -> tuple[Int8[Array, "out in"], Float32[Array, "out blocks"]]:
    """All channels, block by block.

    Args:
        weight: in the order of the sweep.
        feedback: A.
        pivots: D.
        scales: of each weight; None: a block is a group, and its scale is made when its turn comes.
        width: channels of a block.
        bits: of the grid.
        options: of the method.

    Returns:
        Integers, and a scale for each block (of no use where `scales` are given).
    """
    out, size = weight.shape
    blocks = -(-size // width)
    rest = blocks * width - size
    # Channels first, so that one is a row. Those beyond the end have weight 0 and get nothing from any other.
    channels = jnp.pad(weight.T, ((0, rest), (0, 0)))
    given = None if scales is None else jnp.pad(scales.T, ((0, rest), (0, 0)), constant_values=1)
    feedback, pivots = jnp.pad(feedback, (0, rest)), jnp.pad(pivots, (0, rest))
    identity = jnp.eye(width, dtype=jnp.float32)

    def block(errors: jax.Array, start: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        original = lax.dynamic_slice_in_dim(channels, start, width)
        columns = lax.dynamic_slice_in_dim(feedback, start, width, axis=1)
        corner = lax.dynamic_slice_in_dim(columns, start, width)
        # One at a time: jaxlib 0.10.2 runs a batch of LAPACK calls on XLA's threads and waits on one of them, which
        # hangs when all of them wait.
        within = solve_triangular(corner + identity, identity, unit_diagonal=True)
        carried = jnp.matmul(columns.T, errors, precision=lax.Precision.HIGHEST)
        target = original + jnp.matmul(within.T, carried, precision=lax.Precision.HIGHEST)
        if given is None:
            one = _scales(target.T, lax.dynamic_slice_in_dim(pivots, start, width), bits, options)
            scale = jnp.broadcast_to(one[None, :], target.shape)
        else:
            scale = lax.dynamic_slice_in_dim(given, start, width)
        grid = _block(target, within, scale, bits)
        # A group that is not finite hands nothing on.
        lost = jnp.where(jnp.isfinite(scale), original - grid * scale, np.float32(0))
        errors = lax.dynamic_update_slice_in_dim(errors, lost, start, axis=0)
        return errors, (grid.astype(jnp.int8), scale[0])

    starts = jnp.arange(blocks, dtype=jnp.int32) * width
    _, (q, made) = lax.scan(block, jnp.zeros_like(channels), starts)
    return q.reshape(blocks * width, out)[:size].T, made.T


def _block(
    target: Float32[Array, "width out"],
    within: Float32[Array, "width width"],
    scales: Float32[Array, "width out"],
    bits: Bits,
) -> Float32[Array, "width out"]:
    """Values on the grid of a block's channels, one after the other; zero where the scale is not finite."""
    limit = 2 ** (bits - 1) - 1

    def channel(target: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        index, row, scale = at
        finite = jnp.isfinite(scale)
        grid = jnp.where(finite, jnp.clip(jnp.rint(target[index] / scale), -limit, limit), np.float32(0))
        error = jnp.where(finite, target[index] - grid * scale, np.float32(0))
        return target - row[:, None] * error[None, :], grid

    order = jnp.arange(target.shape[0], dtype=jnp.int32)
    _, grid = lax.scan(channel, target, (order, within, scales))
    return grid


def _scales(
    x: Float32[Array, "out width"], pivots: Float32[Array, " width"], bits: Bits, options: GptqOptions
) -> Float32[Array, " out"]:
    """One scale a row. An error of channel k that later channels cannot make up for costs D[k], not H[k, k]."""
    if options.scale == "minmax":
        return quantize_slices(x, bits)[1]
    return ssz_slices(x, pivots[None, :], bits, options.steps)[1]


def _static_scales(
    weight: Float32[Array, "out in"], importance: Float32[Array, " in"], group: int, bits: Bits, options: GptqOptions
) -> Float32[Array, "out groups"]:
    """One scale a row and group, of the weights as they are; errors cost what the inputs are."""
    slices = split_groups(weight, group)
    if options.scale == "minmax":
        return quantize_slices(slices, bits)[1]
    return ssz_slices(slices, split_groups(importance, group)[None], bits, options.steps)[1]
