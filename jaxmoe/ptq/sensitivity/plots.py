"""The charts of an analysis."""

import math
from collections.abc import Mapping
from typing import Any

from jaxmoe.ptq.charts import Series, line_chart


def analysis_charts(result: Mapping[str, Any]) -> dict[str, str]:
    """File name -> SVG: the input's kurtosis, the outputs' error under each scheme, and that of whole layers."""
    charts = {
        "kurtosis.svg": line_chart(
            _by_role(result, lambda row: _logarithm(row["kurtosis"])),
            title="Excess kurtosis of the input of each linear layer",
            x_label="layer",
            y_label="log10(kurtosis + 3)",
        )
    }
    for scheme in result["schemes"]:
        charts[f"error-{scheme}.svg"] = line_chart(
            _by_role(result, lambda row, scheme=scheme: _decibel(row["error"][scheme])),
            title=f"Output error of each linear layer under {scheme}",
            x_label="layer",
            y_label="noise / signal, dB",
        )
    layers = [
        _series(scheme, {row["layer"]: _decibel(row["relative"][scheme]) for row in result["layers"]})
        for scheme in result["schemes"]
    ]
    charts["layers.svg"] = line_chart(
        layers, title="Error of each layer's output", x_label="layer", y_label="noise / signal, dB"
    )
    return charts


def _by_role(result: Mapping[str, Any], value: Any) -> list[Series]:
    by_role: dict[str, dict[int, float | None]] = {}
    for row in result["linears"]:
        by_role.setdefault(row["role"], {})[row["layer"]] = value(row)
    return [_series(role, values) for role, values in sorted(by_role.items())]


def _series(name: str, values: Mapping[int, float | None]) -> Series:
    points = sorted((layer, value) for layer, value in values.items() if value is not None)
    return Series(name=name, xs=tuple(float(x) for x, _ in points), ys=tuple(float(y) for _, y in points))


def _logarithm(kurtosis: float | None) -> float | None:
    """Excess kurtosis is at least -2, and a few massive activations make it 1e5."""
    return None if kurtosis is None else math.log10(kurtosis + 3)


def _decibel(ratio: float | None) -> float | None:
    return 10 * math.log10(ratio) if ratio else None
