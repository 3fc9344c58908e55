"""linear in numpy, as the contract says it, one group at a time. Slow on purpose."""

import numpy as np


def quantize_tokens(x: np.ndarray, limit: int = 127) -> tuple[np.ndarray, np.ndarray]:
    """Per-row grid -limit..limit of float32 rows [tokens, width]; the numpy twin of quant.int8.quantize_slices."""
    x = x.astype(np.float32)
    amax = np.abs(x).max(axis=-1)
    q = np.zeros(x.shape, np.int8)
    scale = np.ones(amax.shape, np.float32)
    for index in np.ndindex(amax.shape):
        if not np.isfinite(amax[index]):
            scale[index] = np.nan
        elif amax[index] >= np.float32(1e-30):
            inverse = np.float32(limit) / amax[index]
            q[index] = np.clip(np.rint(x[index] * inverse), -limit, limit).astype(np.int8)
            scale[index] = amax[index] * np.float32(1 / limit)
    return q, scale


def pack_pairs(values: np.ndarray, group: int) -> np.ndarray:
    """Inverse of `unpack_pairs`."""
    size = values.shape[-1]
    pairs = np.zeros((*values.shape[:-1], size // 2), np.uint8)
    for start in range(0, size, group):
        half = min(group, size - start) // 2
        for index in range(half):
            low, high = values[..., start + index], values[..., start + half + index]
            pairs[..., start // 2 + index] = low % 16 + 16 * (high % 16).astype(np.uint8)
    return pairs


def unpack_pairs(pairs: np.ndarray, group: int) -> np.ndarray:
    """Pairs [..., in / 2] of 4-bit values to int8 [..., in], one element at a time."""
    size = 2 * pairs.shape[-1]
    values = np.zeros((*pairs.shape[:-1], size), np.int8)
    for start in range(0, size, group):
        half = min(group, size - start) // 2
        for index in range(2 * half):
            byte = pairs[..., start // 2 + index % half]
            nibble = byte % 16 if index < half else byte // 16
            values[..., start + index] = np.where(nibble < 8, nibble, nibble.astype(np.int8) - 16)
    return values


def group_products(xq: np.ndarray, wq: np.ndarray, group: int) -> np.ndarray:
    """The exact integer part: [groups, tokens, out] int64."""
    size = xq.shape[-1]
    return np.stack(
        [
            xq[:, start : start + group].astype(np.int64) @ wq[:, start : start + group].astype(np.int64).T
            for start in range(0, size, group)
        ]
    )


def w8a8(x: np.ndarray, wq: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    """x [tokens, in] float32, wq [out, in] int8, scale [out, groups] float32 -> [tokens, out] float32.

    W4A8 is the same with the unpacked values.
    """
    xq, sx = quantize_tokens(x)
    products = group_products(xq, wq, group)
    total = products[0].astype(np.float32) * scale[:, 0]
    for index in range(1, len(products)):
        total = total + products[index].astype(np.float32) * scale[:, index]
    return total * sx[:, None]


def dequantize(wq: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    """The float32 weight that wq [..., in] and scale [..., groups] stand for."""
    return wq.astype(np.float32) * np.repeat(scale, group, axis=-1)[..., : wq.shape[-1]]
