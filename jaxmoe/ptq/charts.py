"""Charts as text: SVG line charts, and heat maps as PNG in a data URL. No dependency, the same bytes everywhere."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np
from jaxtyping import Float, UInt8

_COLOURS: Final = ("#1f6fb4", "#d1495b", "#2e8b57", "#e08e0b", "#6b4ca5", "#3fb8c4", "#8a5a44", "#c23b9e", "#5c6b73")
_DASHES: Final = ("", "6 3", "2 3")
"""A second and third round of the colours."""
_WIDTH, _HEIGHT = 760.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 190.0, 34.0, 44.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: points (x, y) in order. len(xs) == len(ys); all finite."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


def line_chart(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """A standalone SVG with a legend; points carry their values as tooltips.

    Args:
        series: lines; those without points are left out of the drawing but stay in the legend.
        title: above.
        x_label: below.
        y_label: beside.
    """
    points = [(x, y) for each in series for x, y in zip(each.xs, each.ys, strict=True)]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    across, up = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    low_x, high_x = min(across[0], *xs), max(across[-1], *xs)
    low_y, high_y = min(up[0], *ys), max(up[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return (
            _LEFT + inner_width * (x - low_x) / (high_x - low_x),
            _TOP + inner_height * (high_y - y) / (high_y - low_y),
        )

    parts = [_text(_LEFT, 20.0, title, "start", "font-weight='bold'")]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, "middle"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(_text(14.0, middle, y_label, "middle", f"transform='rotate(-90 14 {middle:.1f})'"))
    for y in up:
        left, level = place(low_x, y)
        parts.append(f"<path d='M{left:.1f} {level:.1f}H{_WIDTH - _RIGHT:g}' stroke='#ddd'/>")
        parts.append(_text(left - 6, level + 4, _number(y), "end"))
    for x in across:
        left, floor = place(x, low_y)
        parts.append(f"<path d='M{left:.1f} {floor:.1f}v4' stroke='#555'/>")
        parts.append(_text(left, floor + 17, _number(x), "middle"))
    for index, each in enumerate(series):
        parts.append(_line(index, each, [place(x, y) for x, y in zip(each.xs, each.ys, strict=True)]))
    height = max(_HEIGHT, _TOP + 16 * len(series) + 8)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH:g} {height:g}' width='{_WIDTH:g}' "
        f"height='{height:g}' font-family='sans-serif' font-size='12'><rect width='100%' height='100%' fill='white'/>"
        f"{''.join(parts)}</svg>"
    )


def heat_map(values: Float[np.ndarray, "rows columns"]) -> str:
    """A data URL of a PNG with one pixel a value: white is 0 and dark blue is 1.

    Args:
        values: shares in [0, 1].
    """
    assert values.size and np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1
    white, blue = np.array([255.0, 255.0, 255.0]), np.array([8.0, 48.0, 107.0])
    pixels = np.rint(white + values[..., None] * (blue - white)).astype(np.uint8)
    return "data:image/png;base64," + base64.b64encode(_png(pixels)).decode("ascii")


def _png(pixels: UInt8[np.ndarray, "rows columns 3"]) -> bytes:
    """Source: PNG specification (ISO/IEC 15948): signature, IHDR, IDAT of rows with filter 0, IEND."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows, columns, _ = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from at most `low` to at least `high`; never fewer than two."""
    if low == high:
        low, high = low - 1, high + 1
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def _line(index: int, series: Series, places: Sequence[tuple[float, float]]) -> str:
    colour = _COLOURS[index % len(_COLOURS)]
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    style = f"stroke='{colour}'" + (f" stroke-dasharray='{dash}'" if dash else "")
    legend = _TOP + 16 * index
    parts = [
        f"<path d='M{_WIDTH - _RIGHT + 12:g} {legend:g}h18' {style} stroke-width='2'/>",
        _text(_WIDTH - _RIGHT + 36, legend + 4, series.name, "start"),
    ]
    if places:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f"<path d='M{path}' fill='none' {style} stroke-width='1.5'/>")
    for (x, y), value_x, value_y in zip(places, series.xs, series.ys, strict=True):
        tip = escape(f"{series.name}: {_number(value_x)}, {value_y:.4g}")
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{colour}'><title>{tip}</title></circle>")
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {more}>{escape(text)}</text>"


def _number(value: float) -> str:
    return f"{value:.6g}"
