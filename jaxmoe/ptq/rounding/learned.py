"""Learned rounding: integers and scales are chosen together for the least error of the outputs.

What is minimised is `tr((W - Q) H (W - Q)^T)`, the squared error of `x @ w.T` over the inputs x behind H, so the inputs
themselves are not needed. Starting with another method's integers and scales, first
    Q = scale * factor * clip(rint(W / (scale * factor) + offset))
moves by signed gradient descent on an offset of each weight, within -1/2..1/2, and a factor of each scale, where rint
counts as the identity when it is differentiated. Then, by exact steps, for each channel k and each group g in turn
    q[:, k]      = the best integers of the channel, all else as it is
    scale[:, g]  = the best scale of the group, all else as it is
The exact steps go from where descent ends and from the start itself, and each row keeps the best of all that it has
seen. Each part is needed: exact steps alone get stuck early, descent alone stops short of what a last look at every
single weight still finds, and where a few directions hold nearly all of the inputs neither finds what GPTQ does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.rounding.gptq import NEAREST, GptqOptions, round_gptq
from jaxmoe.ptq.rounding.slices import Rounded, join_groups, one_by_one, split_groups
from jaxmoe.ptq.rounding.ssz import ssz_slices
from jaxmoe.quant.int8 import SMALLEST, expand_groups, quantize_groups
from jaxmoe.quant.scheme import Bits

_CHANNEL_BLOCK: Final = 128
"""Channels that are looked at one by one before a matrix product carries their changes on."""
_SSZ_STEPS: Final = 50
_FACTORS: Final = (0.5, 1.5)
"""How far a scale may move from its start, as a factor."""
_EXPONENT: Final = 100
"""Rows are brought to magnitudes near 1 by a power of two of at most this, which float32 holds both ways."""

Start = Literal["nearest", "ssz", "gptq"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedOptions:
    """Where the search starts and how far it goes."""

    start: Start = "gptq"
    """Whose integers and scales it starts from. Those of gptq are in order of activity, on the scales of ssz, and with
    the same damping; a descent needs only the scales."""
    steps: int = 50
    """Steps of gradient descent, a matrix product each; none: only exact ones. 200 gain about 1/400 of the error."""
    rate: float | None = None
    """Length of the first step: for offsets in steps of the grid, for factors as a fraction. Later ones shrink evenly
    to nothing, so that all together move by `rate * (steps + 1) / 2`. Absent: `1 / steps`."""
    refine: int = 10
    """Rounds of exact steps over all channels and groups, three matrix products each, from both beginnings;
    none: only descent."""
    damping: float = 0.1
    """What is added to the diagonal of H, as a fraction of the diagonal's mean, so that errors are not made up for
    along directions that were hardly seen."""

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            RecipeError: one does not hold.
        """
        if self.steps < 0 or self.refine < 0 or self.steps + self.refine == 0:
            raise RecipeError(
                f"rounding learned: steps = {self.steps} and refine = {self.refine}, but neither is negative and a "
                f"search needs one or more; use method {self.start}"
            )
        if self.rate is not None and not 0 < self.rate <= 1:
            raise RecipeError(f"rounding learned: rate = {self.rate}, but a step of the search is in (0, 1]")
        if not 0 < self.damping < np.inf:
            raise RecipeError(f"rounding learned: damping = {self.damping}, but damping is positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """One weight that is rounded, and what its errors cost.

    Invariants: weight is float32 [out, in], each row with a power of two of its own, so that squares of errors neither
    overflow nor vanish, and 0 in groups that take no part; hessian is damped and positive definite [in, in].
    """

    weight: jax.Array
    hessian: jax.Array
    free: jax.Array
    """Groups that take part, [out, groups]."""
    start: jax.Array
    """Scales at the start, [out, groups], in units of the weight; 1 in groups that take no part."""
    group: int
    limit: int
    """Largest integer."""

    def wide(self, x: jax.Array) -> jax.Array:
        """A number of each group for each of its channels."""
        return expand_groups(x, self.group, self.weight.shape[-1])


@partial(jax.tree_util.register_dataclass, data_fields=["cost", "grid", "scale"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A candidate: its cost [out], and its integers [out, in] and scales [out, groups], all float32."""

    cost: jax.Array
    grid: jax.Array
    scale: jax.Array


def round_learned(
    weight: Float[Array, "*lead out in"],
    hessian: Float32[Array, "*lead in in"],
    group: int,
    bits: Bits,
    options: LearnedOptions,
) -> Rounded:
    """Rounds so that the error of `x @ w.T` is small for inputs x like those that `hessian` was made from.

    Where H is not positive definite even with damping, as without any tokens, weights are rounded to nearest and the
    status is `NEAREST`. A channel that never was other than zero costs the damping, and so ends up near its weight. A
    Hessian that is not finite gives scale NaN in all groups; a group of weights that is not finite gives it in that
    group, and the others do not look at it.

    Args:
        weight: any float; computed in float32.
        hessian: sum (or mean: its size does not matter) of x x^T.
        group: input elements per scale.
        bits: of the grid.
        options: see there.

    Source: Cheng et al. 2023 (signed gradient descent, AutoRound); Nagel et al. 2020 (AdaRound).
    """
    return one_by_one(partial(_learned, group=group, bits=bits, options=options), weight, hessian)


def _learned(weight: jax.Array, hessian: jax.Array, *, group: int, bits: Bits, options: LearnedOptions) -> Rounded:
    weight = weight.astype(jnp.float32)
    damped, definite = _damped(hessian, options.damping)
    q, scale = _start(weight, hessian, group, bits, options)
    exponent = _exponents(weight)
    problem = _problem(weight, damped, jnp.ldexp(scale, exponent), definite, exponent, group, bits)
    part = problem.wide(problem.free)
    found = [_look(problem, jnp.where(part, q.astype(jnp.float32), np.float32(0)), problem.start)[0]]
    if options.steps:
        with jax.named_scope("descend"):
            found.append(_descend(problem, options))
    if options.refine:
        with jax.named_scope("refine"):
            found = _refined(problem, found, options.refine)
    best = reduce(_better, found)
    plain_q, plain_scale = quantize_groups(weight, group, bits)
    q = jnp.where(part, best.grid.astype(jnp.int8), plain_q)
    scale = jnp.where(problem.free, jnp.ldexp(best.scale, -exponent), plain_scale)
    known = jnp.all(jnp.isfinite(hessian))
    return Rounded(
        qvalue=jnp.where(known, q, jnp.int8(0)),
        scale=jnp.where(known, scale, np.float32(np.nan)),
        status=jnp.where(definite, jnp.int32(0), jnp.int32(NEAREST)),
    )


def _damped(hessian: Float32[Array, "in in"], damping: float) -> tuple[Float32[Array, "in in"], Bool[Array, ""]]:
    """H with damping, near 1 by a power of two, and whether it is positive definite; if not, the identity."""
    _, exponent = jnp.frexp(jnp.mean(jnp.diagonal(hessian)))
    unit = jnp.ldexp(hessian, -exponent)
    identity = jnp.eye(*hessian.shape, dtype=jnp.float32)
    damped = unit + damping * jnp.mean(jnp.diagonal(unit)) * identity
    pivots = jnp.diagonal(jnp.linalg.cholesky(damped))
    definite = jnp.all(jnp.isfinite(hessian)) & jnp.all(pivots > 0)
    return jnp.where(definite, damped, identity), definite


def _start(
    weight: Float32[Array, "out in"],
    hessian: Float32[Array, "in in"],
    group: int,
    bits: Bits,
    options: LearnedOptions,
) -> tuple[Int8[Array, "out in"], Float32[Array, "out groups"]]:
    if options.start == "nearest":
        return quantize_groups(weight, group, bits)
    if options.start == "ssz":
        importance = split_groups(jnp.diagonal(hessian), group)[None]
        q, scale = ssz_slices(split_groups(weight, group), importance, bits, _SSZ_STEPS)
        return join_groups(q, weight.shape[-1]), scale
    alike = GptqOptions(damping=options.damping, most_damping=options.damping, steps=_SSZ_STEPS)
    rounded = round_gptq(weight, hessian, group, bits, alike)
    return rounded.qvalue, rounded.scale


def _exponents(weight: Float32[Array, "out in"]) -> Int32[Array, "out 1"]:
    """Of the power of two that brings the largest finite weight of a row near 1."""
    largest = jnp.max(jnp.where(jnp.isfinite(weight), jnp.abs(weight), np.float32(0)), axis=-1, keepdims=True)
    return jnp.clip(-jnp.frexp(largest)[1], -_EXPONENT, _EXPONENT)


def _problem(
    weight: Float32[Array, "out in"],
    damped: Float32[Array, "in in"],
    scale: Float32[Array, "out groups"],
    definite: Bool[Array, ""],
    exponent: Int32[Array, "out 1"],
    group: int,
    bits: Bits,
) -> _Problem:
    """In which groups of zeros, of what is not finite and of weights that vanish beside their row's take no part.

    They are rounded to nearest, and their errors count as none.
    """
    largest = jnp.max(jnp.abs(split_groups(weight, group)), axis=-1)
    free = definite & jnp.isfinite(scale) & (scale > SMALLEST) & (largest >= SMALLEST)
    part = expand_groups(free, group, weight.shape[-1])
    return _Problem(
        weight=jnp.where(part, jnp.ldexp(weight, exponent), np.float32(0)),
        hessian=damped,
        free=free,
        start=jnp.where(free, scale, np.float32(1)),
        group=group,
        limit=2 ** (bits - 1) - 1,
    )


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _look(
    problem: _Problem, grid: Float32[Array, "out in"], scale: Float32[Array, "out groups"]
) -> tuple[_Seen, Float32[Array, "out in"]]:
    """A candidate, and half the gradient of its cost by the errors."""
    errors = problem.weight - grid * problem.wide(scale)
    slopes = _matmul(errors, problem.hessian)
    return _Seen(cost=jnp.sum(errors * slopes, axis=-1), grid=grid, scale=scale), slopes


def _better(best: _Seen, seen: _Seen) -> _Seen:
    """The cheaper of each row; of equal ones, and beside NaN, the first."""
    better = seen.cost < best.cost
    return jax.tree.map(lambda old, new: jnp.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old), best, seen)


def _descend(problem: _Problem, options: LearnedOptions) -> _Seen:
    """Signed gradient descent from offsets 0 and factors 1: the best of what it passes."""
    rate = 1 / options.steps if options.rate is None else options.rate
    optimizer = optax.sign_sgd(optax.linear_schedule(rate, 0.0, options.steps))
    part, least, most = problem.wide(problem.free), *_FACTORS

    def cost(params: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, _Seen]:
        offsets, factors = params
        scale = problem.start * factors
        wide = problem.wide(scale)
        real = jnp.where(part, problem.weight / wide + offsets, np.float32(0))
        rounded = jnp.rint(real)
        grid = jnp.clip(rounded, -problem.limit, problem.limit)
        seen, slopes = _look(problem, lax.stop_gradient(grid), lax.stop_gradient(scale))
        # The integers again, but moving as the real numbers do, unless they are cut off.
        inside = jnp.abs(rounded) <= problem.limit
        grid = lax.stop_gradient(grid) + jnp.where(inside, real - lax.stop_gradient(real), np.float32(0))
        # Half the gradient of the cost, for one matrix product instead of the three that the cost itself would take.
        errors = problem.weight - grid * wide
        return jnp.sum(errors * lax.stop_gradient(slopes)), seen

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        params, moments, best = state
        gradient, seen = jax.grad(cost, has_aux=True)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        moved: Any = optax.apply_updates(params, updates)
        offsets, factors = moved
        return ((jnp.clip(offsets, -0.5, 0.5), jnp.clip(factors, least, most)), moments, _better(best, seen)), None

    params = (jnp.zeros_like(problem.weight), jnp.ones_like(problem.start))
    best = jax.tree.map(jnp.zeros_like, cost(params)[1])
    best = replace(best, cost=jnp.full_like(best.cost, np.inf))
    (params, _, best), _ = lax.scan(step, (params, optimizer.init(params), best), length=options.steps)
    return _better(best, cost(params)[1])


def _refined(problem: _Problem, found: list[_Seen], rounds: int) -> list[_Seen]:
    """Each of some candidates refined, side by side as more rows of one weight."""
    times = len(found)
    taller = replace(
        problem,
        weight=jnp.tile(problem.weight, (times, 1)),
        free=jnp.tile(problem.free, (times, 1)),
        start=jnp.tile(problem.start, (times, 1)),
    )
    best = _refine(taller, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found), rounds)
    out = problem.weight.shape[0]
    return [jax.tree.map(lambda x, at=at: x[at * out : (at + 1) * out], best) for at in range(times)]


def _refine(problem: _Problem, best: _Seen, rounds: int) -> _Seen:
    """Exact steps from `best`, all channels and then all groups a round."""

    def once(state: tuple[jax.Array, jax.Array, _Seen], _: None) -> tuple[tuple[jax.Array, jax.Array, _Seen], None]:
        grid, scale, best = state
        seen, slopes = _look(problem, grid, scale)
        grid, slopes = _best_integers(problem, grid, scale, slopes)
        return (grid, _best_scales(problem, grid, scale, slopes), _better(best, seen)), None

    (grid, scale, best), _ = lax.scan(once, (best.grid, best.scale, best), length=rounds)
    return _better(best, _look(problem, grid, scale)[0])


def _best_integers(
    problem: _Problem,
    grid: Float32[Array, "out in"],
    scale: Float32[Array, "out groups"],
    slopes: Float32[Array, "out in"],
) -> tuple[Float32[Array, "out in"], Float32[Array, "out in"]]:
    """Each channel in turn: the integer nearest to where the cost, a parabola in it, is least. And the slopes then."""
    out, size = grid.shape
    width = min(size, _CHANNEL_BLOCK)
    blocks = -(-size // width)
    rest = blocks * width - size

    def channels(x: jax.Array, fill: float | bool) -> jax.Array:
        """Channels first, so that one is a row, and whole blocks: those beyond the end have no slope and stay 0."""
        return jnp.pad(x.T, ((0, rest), (0, 0)), constant_values=fill)

    hessian = jnp.pad(problem.hessian, (0, rest))
    curvature = jnp.pad(jnp.diagonal(problem.hessian), (0, rest), constant_values=1)
    part, steps = channels(problem.wide(problem.free), False), channels(problem.wide(scale), 1.0)
    grid = channels(grid, 0.0)

    def block(slopes: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=width)
        rows = cut(hessian)

        def channel(slopes: jax.Array, at: Sequence[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            index, old, step, part, curvature, row = at
            new = jnp.clip(jnp.rint(old + slopes[index] / (curvature * step)), -problem.limit, problem.limit)
            new = jnp.where(part, new, old)
            change = (old - new) * step
            return slopes + row[:, None] * change[None, :], (new, change)

        corner = lax.dynamic_slice_in_dim(rows, start, width, axis=1)
        at = (jnp.arange(width, dtype=jnp.int32), cut(grid), cut(steps), cut(part), cut(curvature), corner)
        _, (new, changes) = lax.scan(channel, cut(slopes), at)
        return slopes + _matmul(rows.T, changes), new

    after, new = lax.scan(block, channels(slopes, 0.0), jnp.arange(blocks, dtype=jnp.int32) * width)
    return new.reshape(blocks * width, out)[:size].T, after[:size].T


def _best_scales(
    problem: _Problem,
    grid: Float32[Array, "out in"],
    scale: Float32[Array, "out groups"],
    slopes: Float32[Array, "out in"],
) -> Float32[Array, "out groups"]:
    """Each group in turn: the scale where the cost, a parabola in it, is least; stays where that is too far away."""
    group, groups = problem.group, scale.shape[-1]
    rest = ((0, 0), (0, groups * group - grid.shape[-1]))
    grid, slopes, hessian = jnp.pad(grid, rest), jnp.pad(slopes, rest), jnp.pad(problem.hessian, rest[1])

    def one(slopes: jax.Array, at: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, old, first, part = at
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=group, axis=1)
        q = cut(grid)
        direction = _matmul(q, lax.dynamic_slice_in_dim(hessian, start, group))
        curvature = jnp.sum(cut(direction) * q, axis=-1)
        known = part & (curvature > 0)
        new = old + jnp.sum(cut(slopes) * q, axis=-1) / jnp.where(known, curvature, np.float32(1))
        least, most = _FACTORS
        new = jnp.where(known & (new >= least * first) & (new <= most * first), new, old)
        return slopes - (new - old)[:, None] * direction, new

    starts = jnp.arange(groups, dtype=jnp.int32) * group
    _, new = lax.scan(one, slopes, (starts, scale.T, problem.start.T, problem.free.T))
    return new.T
