"""Block rotations: random signs, then a Walsh-Hadamard transform of each block of channels.

R = diag(signs) blockdiag(H, .., H) / sqrt(block). R is orthogonal, and a vector's energy in one channel spreads evenly
over its block. Source: Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456), section 3.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from jaxmoe.errors import RecipeError

_CHUNK_ELEMENTS = 1 << 15
"""Elements that are transformed at a time: all passes over them stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """An orthogonal matrix R [size, size], as the few numbers that make it; made by `make_rotation`.

    Invariant: `block` is a power of two, size % block == 0, and R R^T = 1.
    """

    size: int
    block: int
    seed: tuple[int, ...]

    def signs(self) -> Float32[np.ndarray, " size"]:
        """Plus or minus one for each channel: raw bits of PCG64, the same on every machine and numpy version."""
        words = np.random.PCG64(self.seed).random_raw(self.size)
        return np.where(words >> np.uint64(63), np.float32(1), np.float32(-1))

    @property
    def scale(self) -> np.float32:
        """1 / sqrt(block)."""
        return np.float32(1 / math.sqrt(self.block))


def largest_block(size: int) -> int:
    """The largest power of two that divides a width: 64 of 576, 1024 of 7168."""
    return size & -size


def make_rotation(size: int, seed: tuple[int, ...], block: int | None = None) -> Rotation:
    """The rotation of a width.

    Args:
        size: channels.
        seed: what the signs are drawn from.
        block: channels that are mixed with each other; None: the largest power of two that divides the width.

    Raises:
        RecipeError: the block is no power of two above 1, or does not divide the width.
    """
    chosen = largest_block(size) if block is None else block
    if chosen < 2 or chosen & (chosen - 1):
        hint = "the width is odd" if block is None else "choose a power of two of at least 2"
        raise RecipeError(f"rotation: {size} channels in blocks of {chosen} cannot be rotated; {hint}")
    if size % chosen:
        raise RecipeError(
            f"rotation: {size} channels are no multiple of the block {chosen}; choose a power of two up to "
            f"{largest_block(size)}"
        )
    return Rotation(size=size, block=chosen, seed=seed)


def rotate_(x: np.ndarray, rotation: Rotation, *, axis: int = -1, first: int = 0) -> None:
    """x <- x R along an axis, in place, in float32 sums of a fixed order.

    The axis may hold some whole blocks of channels or several vectors one after another: a block's result depends on
    nothing else, to the bit.

    Args:
        x: float32 array (or view).
        rotation: R.
        axis: of the channels.
        first: channel that the axis begins with; a multiple of the block.
    """
    assert x.dtype == np.float32 and first % rotation.block == 0 == x.shape[axis] % rotation.block, (x.dtype, x.shape)
    tail = (1,) * (-1 - axis if axis < 0 else x.ndim - 1 - axis)
    x *= np.take(rotation.signs(), np.arange(first, first + x.shape[axis]) % rotation.size).reshape(-1, *tail)
    _transform_blocks(x, rotation, axis)


def _transform_blocks(x: np.ndarray, rotation: Rotation, axis: int) -> None:
    """Applies H / sqrt(block) to every block, a cacheful at a time."""
    block = rotation.block
    moved = np.moveaxis(x, axis, 0)
    blocks = moved.reshape(moved.shape[0] // block, block, -1)
    # A view, unless x is itself a view that cannot be cut so.
    in_place = np.shares_memory(blocks, x)
    columns = blocks.shape[2]
    step = max(1, _CHUNK_ELEMENTS // block)
    scratch = np.empty((2, block, min(step, columns)), np.float32)
    for part in blocks:
        for start in range(0, columns, step):
            piece = part[:, start : start + step]
            width = piece.shape[1]
            piece[...] = _transform(piece, scratch[:, :, :width], rotation.scale)
    if not in_place:
        moved[...] = blocks.reshape(moved.shape)


def _transform(x: np.ndarray, scratch: np.ndarray, scale: np.float32) -> np.ndarray:
    """H x * scale along the first axis. Each pass adds and subtracts the halves and interleaves the results; after
    log2(n) passes the channels are in their own order again."""
    half = len(x) // 2
    scratch[0] = x
    source, target = scratch
    for _ in range(len(x).bit_length() - 1):
        np.add(source[:half], source[half:], out=target[0::2])
        np.subtract(source[:half], source[half:], out=target[1::2])
        source, target = target, source
    return np.multiply(source, scale, out=target)
