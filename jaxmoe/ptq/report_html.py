"""The quality report of a quantised checkpoint as one HTML page that needs no network.

All text that comes from files is escaped. What the report does not hold is not shown; nothing is made up.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError
from jaxmoe.ptq.charts import Series, heat_map, line_chart
from jaxmoe.ptq.report import REPORT_NAME, StoredBytes, stored_bytes
from jaxmoe.weights.layout import write_text_atomic
from jaxmoe.weights.load import open_model

PAGE_NAME: Final = "report.html"

_LAYER: Final = re.compile(r"\.(\d+)\.")
_STYLE: Final = """
body { font: 14px/1.5 sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
img { image-rendering: pixelated; border: 1px solid #999; max-width: 100% }
pre { background: #f5f5f5; padding: .8rem; overflow: auto }
svg { max-width: 100%; height: auto }
.hash { font-family: monospace; word-break: break-all }
"""


def write_report_page(folder: Path, evaluation: Mapping[str, Any] | None = None) -> Path:
    """Writes `report.html` into a quantised checkpoint's folder; the result is its path.

    Args:
        folder: with its report and the checkpoint itself.
        evaluation: the object of `jaxmoe eval --json`.

    Raises:
        ConfigError: the folder has no report, or one of the objects is not what these programs write.
        JaxMoeError: see `open_model`.
    """
    path = folder / REPORT_NAME
    if not path.exists():
        raise ConfigError(f"{folder} has no {REPORT_NAME}; give the folder that jaxmoe quantize wrote")
    page = report_page(read_json(path), stored_bytes(open_model(folder)), evaluation, title=folder.name)
    write_text_atomic(folder / PAGE_NAME, page)
    return folder / PAGE_NAME


def report_page(
    report: Mapping[str, Any],
    stored: Sequence[StoredBytes],
    evaluation: Mapping[str, Any] | None = None,
    *,
    title: str,
) -> str:
    """The page.

    Args:
        report: the object of `REPORT_NAME`.
        stored: how the result's bytes are divided.
        evaluation: the object of `jaxmoe eval --json`; None: it was not evaluated.
        title: what was quantised.

    Raises:
        ConfigError: one of the objects lacks what every report has.
    """
    with _made_by(f"the report of {title}", "jaxmoe"):
        summary = _summary(report)
        rest = (_bytes(stored, report), _errors(report), _coverage(report), _worst(report), _recipe(report))
    with _made_by(f"the evaluation of {title} (--eval)", "jaxmoe eval --json"):
        parts = (summary, _evaluation(evaluation), *rest)
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
    body = "".join(part for part in parts if part)
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n"


@contextmanager
def _made_by(what: str, writer: str) -> Iterator[None]:
    """What goes wrong in the block is the fault of a file that is not what its writer writes."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{what} is not one that {writer} wrote: {type(error).__name__} {error}") from error


def layer_of(tensor: str) -> int | None:
    """Number of the layer in a tensor's name: the first number between dots; None: it is in none."""
    match = _LAYER.search(tensor)
    return None if match is None else int(match[1])


def _summary(report: Mapping[str, Any]) -> str:
    source, calibration, ratio = report["source"], report["calibration"], report["sqnr_db"]
    before, after = int(source["bytes"]), int(report["result_bytes"])
    rows = [
        ("recipe", _text(report["recipe"]["name"])),
        ("size", f"{before:,} → {after:,} bytes ({after / max(1, before):.1%})"),
        ("weight SQNR, mean and least tensor", f"{_decibel(ratio['mean'])}, {_decibel(ratio['min'])}"),
        ("groups whose weights are all zero on the grid", f"{int(report['zero_groups']):,}"),
        ("source", f"{_text(source['format'])}, {int(source['tensors']):,} tensors"),
        ("sha256 of the source's config.json", _hash(source["config_sha256"])),
    ]
    if calibration is None:
        rows.append(("calibration", "none: the recipe needs no data"))
    else:
        samples = calibration["samples"]
        rows.append(("calibration", f"{int(samples['samples']):,} samples, {int(samples['tokens']):,} tokens"))
        rows.append(("sha256 of the calibration data", _hash(calibration["data_sha256"])))
    rows.append(("written by", f"jaxmoe {_text(report['jaxmoe'])}, jax {_text(report['jax'])}"))
    return _table(None, rows)


def _evaluation(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    rows = []
    for part in (*result["ranges"], result["overall"]):
        whole = part is result["overall"]
        place = "all" if whole else f"{int(part['start'])}–{int(part['stop'] or result['window_tokens'])}"
        own, base = float(part["perplexity"]), part["baseline_perplexity"]
        change = "" if base is None else f"{own / float(base) - 1:+.2%} ± {float(part['standard_error']):.2%}"
        known = ("", "") if base is None else (f"{float(base):.3f}", f"{float(part['kl']):.4f}")
        rows.append((place, f"{int(part['tokens']):,}", known[0], f"{own:.3f}", change, known[1]))
    text = "<h2>Perplexity through the serving path</h2>"
    text += _table(("positions", "tokens", "baseline", "model", "difference", "KL (nats)"), rows)
    if result["router_agreement"] is not None:
        agreement, worst = float(result["router_agreement"]), float(result["router_agreement_worst_layer"])
        text += f"<p>Router agreement {agreement:.2%} of chosen experts, worst layer {worst:.2%}.</p>"
    return text


def _bytes(stored: Sequence[StoredBytes], report: Mapping[str, Any]) -> str:
    rows = [(_text(each.stored), f"{each.tensors:,}", f"{each.nbytes:,}", f"{each.share:.2%}") for each in stored]
    roles: dict[tuple[str, str], int] = {}
    for tensor in report["tensors"]:
        key = (tensor["role"], tensor["scheme"])
        roles[key] = roles.get(key, 0) + 1
    by_role = [(_text(role), _text(scheme), f"{count:,}") for (role, scheme), count in sorted(roles.items())]
    return (
        "<h2>Bytes by scheme</h2>"
        + _table(("stored as", "tensors", "bytes", "share"), rows)
        + (_table(("quantised role", "scheme", "tensors"), by_role) if by_role else "<p>Nothing is quantised.</p>")
    )


def _errors(report: Mapping[str, Any]) -> str:
    by_role: dict[str, dict[int, list[float]]] = {}
    for tensor in report["tensors"]:
        layer = layer_of(tensor["name"])
        if layer is not None and tensor["sqnr_db"] is not None:
            by_role.setdefault(tensor["role"], {}).setdefault(layer, []).append(float(tensor["sqnr_db"]))
    if not by_role:
        return ""
    series = [
        Series(name=role, xs=tuple(map(float, sorted(layers))), ys=tuple(min(layers[at]) for at in sorted(layers)))
        for role, layers in sorted(by_role.items())
    ]
    chart = line_chart(
        series, title="Weight SQNR, the worst tensor of each layer and role", x_label="layer", y_label="dB"
    )
    return f"<h2>Rounding error by layer</h2>{chart}"


def _coverage(report: Mapping[str, Any]) -> str:
    calibration = report["calibration"]
    if calibration is None or calibration["coverage"] is None:
        return ""
    coverage, counts = calibration["coverage"], np.asarray(calibration["tokens_per_expert"], np.float64)
    if counts.ndim != 2 or not counts.size:
        raise ValueError(f"tokens_per_expert has shape {counts.shape}")
    # Logarithmic: what matters is the difference between none, few and enough.
    shades = np.log1p(counts) / np.log1p(max(1.0, counts.max()))
    height, width = (max(6 * size, 60) for size in counts.shape)
    cold = [
        (f"layer {int(e['layer'])}, expert {int(e['expert'])}", f"{int(e['tokens']):,}") for e in coverage["coldest"]
    ]
    return (
        "<h2>Tokens that reached each expert</h2>"
        f"<p>{int(coverage['experts']):,} experts in {int(coverage['layers']):,} layers: least "
        f"{int(coverage['min_tokens']):,} tokens, median {float(coverage['median_tokens']):g}; "
        f"{int(coverage['below']):,} ({float(coverage['share_below']):.1%}) have fewer than "
        f"{int(coverage['threshold_tokens']):,}. One row a layer, one column an expert; white is none, dark is "
        f"{int(counts.max()):,}.</p><img alt='tokens of each expert' style='width: {width}px; height: {height}px' "
        f"src='{heat_map(shades)}'>" + _table(("coldest", "tokens"), cold)
    )


def _worst(report: Mapping[str, Any]) -> str:
    rows = [
        (_text(each["name"]), _text(each["role"]), _text(each["scheme"]), _decibel(each["sqnr_db"]))
        for each in report["worst"]
    ]
    return "<h2>Worst tensors</h2>" + _table(("tensor", "role", "scheme", "SQNR"), rows) if rows else ""


def _recipe(report: Mapping[str, Any]) -> str:
    return f"<h2>Recipe</h2><pre>{escape(json.dumps(report['recipe'], indent=2, ensure_ascii=False))}</pre>"


def _table(head: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "" if head is None else "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
    return f"<table>{top}" + "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows) + "</table>"


def _text(value: object) -> str:
    return escape(str(value))


def _hash(value: object) -> str:
    return f"<span class='hash'>{_text(value)}</span>"


def _decibel(value: float | None) -> str:
    return "—" if value is None else f"{float(value):.2f} dB"
