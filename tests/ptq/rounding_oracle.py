"""The rounding methods again in numpy float64, group by group and channel by channel, and what their tests share."""

from collections.abc import Iterator

import jax
import numpy as np

from jaxmoe.ptq.rounding import METHODS

RUN = {name: jax.jit(method.run, static_argnums=(2, 3, 4)) for name, method in METHODS.items()}
"""Each method compiled once for a shape: (weight, statistic, group, bits, options)."""

Grid = tuple[np.ndarray, np.ndarray]
"""Integers and scales."""


def groups_of(size: int, group: int) -> Iterator[tuple[int, slice]]:
    """(index, channels) of each group."""
    for index, start in enumerate(range(0, size, group)):
        yield index, slice(start, min(start + group, size))


def expand(scale: np.ndarray, group: int, size: int) -> np.ndarray:
    return np.repeat(np.asarray(scale, np.float64), group, axis=-1)[..., :size]


def restored(q: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    return np.asarray(q, np.float64) * expand(scale, group, q.shape[-1])


def nearest_slice(x: np.ndarray, limit: int) -> tuple[np.ndarray, float]:
    amax = np.abs(x).max()
    if amax == 0:
        return np.zeros_like(x), 1.0
    return np.clip(np.rint(x * (limit / amax)), -limit, limit), amax / limit


def ssz_slice(x: np.ndarray, importance: np.ndarray, limit: int, steps: int) -> tuple[np.ndarray, float]:
    """One slice: refit the scale, round, keep the best."""
    q, scale = nearest_slice(x, limit)
    best, least = (q, scale), np.sum(importance * (x - q * scale) ** 2)
    for _ in range(steps):
        square = np.sum(importance * q * q)
        scale = np.sum(importance * x * q) / square if square > 0 else scale
        q = np.clip(np.rint(x / scale), -limit, limit)
        error = np.sum(importance * (x - q * scale) ** 2)
        if error < least:
            best, least = (q, scale), error
    return best


def clip_slice(x: np.ndarray, importance: np.ndarray, limit: int, factors: np.ndarray) -> tuple[np.ndarray, float]:
    """One slice: every factor in turn."""
    best = nearest_slice(x, limit)
    full, least = best[1], np.sum(importance * (x - best[0] * best[1]) ** 2)
    for factor in factors:
        scale = full * factor
        q = np.clip(np.rint(x / scale), -limit, limit)
        error = np.sum(importance * (x - q * scale) ** 2)
        if error < least:
            best, least = (q, scale), error
    return best


def by_groups(weight: np.ndarray, group: int, one) -> Grid:
    """`one(x, channels)` for every row and group of a weight [out, in]."""
    out, size = weight.shape
    q, scale = np.zeros((out, size)), np.zeros((out, -(-size // group)))
    for row in range(out):
        for index, channels in groups_of(size, group):
            q[row, channels], scale[row, index] = one(weight[row, channels].astype(np.float64), channels)
    return q, scale


def textbook_gptq(weight: np.ndarray, hessian: np.ndarray, group: int, limit: int, damping: float, rule: str) -> Grid:
    """Frantar et al., with the upper Cholesky factor of the inverse, all later weights updated after each channel."""
    w = weight.astype(np.float64)
    out, size = w.shape
    upper = _upper(hessian, damping)
    pivots = 1 / np.diagonal(upper) ** 2
    q, scales = np.zeros((out, size)), np.zeros((out, -(-size // group)))
    for index, channels in groups_of(size, group):
        for row in range(out):
            x = w[row, channels]
            slice_of = nearest_slice(x, limit) if rule == "minmax" else ssz_slice(x, pivots[channels], limit, 50)
            scales[row, index] = slice_of[1]
        for k in range(channels.start, channels.stop):
            q[:, k] = _one_channel(w, k, scales[:, index], upper, limit)
    return q, scales


def ordered_gptq(weight: np.ndarray, hessian: np.ndarray, group: int, limit: int, damping: float, rule: str) -> Grid:
    """The same with the largest inputs first, on the grid of the weights as they were (act-order, static groups)."""
    importance = np.diagonal(hessian).astype(np.float64)

    def one(x: np.ndarray, channels: slice) -> tuple[np.ndarray, float]:
        return nearest_slice(x, limit) if rule == "minmax" else ssz_slice(x, importance[channels], limit, 50)

    _, scales = by_groups(weight, group, one)
    order = np.argsort(-importance, kind="stable")
    w, q = weight.astype(np.float64)[:, order], np.zeros(weight.shape)
    upper = _upper(hessian[order][:, order], damping)
    for k, channel in enumerate(order):
        q[:, channel] = _one_channel(w, k, scales[:, channel // group], upper, limit)
    return q, scales


def _upper(hessian: np.ndarray, damping: float) -> np.ndarray:
    h = hessian.astype(np.float64)
    h = h + damping * np.mean(np.diagonal(h)) * np.eye(len(h))
    return np.linalg.cholesky(np.linalg.inv(h)).T


def _one_channel(w: np.ndarray, k: int, scale: np.ndarray, upper: np.ndarray, limit: int) -> np.ndarray:
    """Integers of channel k; its error goes into the later ones of `w`."""
    q = np.clip(np.rint(w[:, k] / scale), -limit, limit)
    error = (w[:, k] - q * scale) / upper[k, k]
    w[:, k + 1 :] -= error[:, None] * upper[k, None, k + 1 :]
    return q


def weighted_norms(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, importance: np.ndarray, group: int):
    """Of each group, in float64: the importance-weighted norms of the error and of the weight, [out, groups]."""
    error = importance * (restored(q, scale, group) - weight.astype(np.float64)) ** 2
    signal = importance * weight.astype(np.float64) ** 2
    starts = range(0, weight.shape[-1], group)
    return np.sqrt(np.add.reduceat(error, starts, axis=-1)), np.sqrt(np.add.reduceat(signal, starts, axis=-1))


def output_error(weight: np.ndarray, q: np.ndarray, scale: np.ndarray, group: int, hessian: np.ndarray) -> float:
    """`sum over tokens of |x @ (restored - weight).T|**2` of the inputs behind a Hessian."""
    error = restored(q, scale, group) - weight.astype(np.float64)
    return float(np.einsum("oi,ij,oj->", error, hessian.astype(np.float64), error))


def inputs(rng: np.random.Generator, tokens: int, size: int) -> np.ndarray:
    """Correlated activations with a few loud channels, as layers have them."""
    basis = rng.normal(size=(size, size)) * (0.5 ** (np.arange(size) / (size / 8)))[:, None]
    x = rng.normal(size=(tokens, size)) @ basis + 0.1 * rng.normal(size=(tokens, size))
    return (x * np.exp(0.5 * rng.normal(size=size))).astype(np.float32)


def gram(x: np.ndarray) -> np.ndarray:
    return x.T @ x
