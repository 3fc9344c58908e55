"""The report's page: its numbers are those of the report and of the files, it loads nothing, nothing escapes."""

import base64
import copy
import json
import zlib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxmoe.cli import main
from jaxmoe.errors import ConfigError
from jaxmoe.ptq.charts import Series, heat_map, line_chart
from jaxmoe.ptq.report import stored_bytes
from jaxmoe.ptq.report_html import layer_of, report_page, write_report_page
from jaxmoe.weights.load import open_model
from tests.running import tiny_folder, tiny_quantized

_VOID = {"meta", "img", "br"}


@cache
def folder() -> Path:
    return tiny_quantized("glm4_moe", "w8a8-g128")


def report() -> dict[str, Any]:
    """That of the tiny model, with the coverage that a calibrated recipe would add."""
    data = json.loads((folder() / "jaxmoe_report.json").read_text(encoding="utf-8"))
    data["calibration"] = {
        "data_sha256": "ab" * 32,
        "samples": {"samples": 4, "tokens": 1234},
        "coverage": {
            "layers": 2,
            "experts": 6,
            "min_tokens": 0,
            "median_tokens": 4.0,
            "threshold_tokens": 256,
            "below": 6,
            "share_below": 1.0,
            "coldest": [{"layer": 1, "expert": 2, "tokens": 0}],
        },
        "tokens_per_expert": [[0, 9, 3], [4, 4, 7]],
    }
    return data


EVALUATION = {
    "kind": "w8a8",
    "overall": {
        "start": 0,
        "stop": None,
        "tokens": 4096,
        "perplexity": 20.4,
        "baseline_perplexity": 20.0,
        "standard_error": 0.001,
        "kl": 0.0123,
    },
    "ranges": [],
    "router_agreement": 0.987,
    "router_agreement_worst_layer": 0.95,
    "windows": 2,
    "window_tokens": 2048,
}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps the tags and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def page(data: dict[str, Any], evaluation: dict[str, Any] | None = None) -> str:
    return report_page(data, stored_bytes(open_model(folder())), evaluation, title="tiny")


def test_numbers_are_those_of_the_report() -> None:
    data = report()
    text = Page(page(data, EVALUATION)).text
    for expected in (
        "w8a8-g128",
        f"{data['result_bytes']:,}",
        data["source"]["config_sha256"],
        "ab" * 32,
        f"{data['sqnr_db']['min']:.2f} dB",
        "layer 1, expert 2",
        "20.400",
        "+2.00% ± 0.10%",
        "98.70%",
        data["worst"][0]["name"],
    ):
        assert expected in text, expected


def test_nothing_is_loaded_from_elsewhere() -> None:
    for tag, attributes in Page(page(report(), EVALUATION)).tags:
        assert tag not in ("script", "link", "iframe", "object")
        for name, value in attributes.items():
            if name in ("src", "href", "action", "data"):
                assert value is not None and value.startswith("data:image/png;base64,"), (tag, name)


def test_text_of_files_is_escaped() -> None:
    """A recipe, a tensor or a role may be named anything."""
    data = copy.deepcopy(report())
    evil = "<script>alert('x')</script>\"&"
    data["recipe"]["name"] = evil
    data["source"]["config_sha256"] = evil
    data["worst"][0]["name"] = evil
    data["tensors"][0]["role"] = evil
    written = Page(report_page(data, [], None, title=evil))
    assert "script" not in {tag for tag, _ in written.tags}
    assert written.text.count(evil) >= 5


def test_nothing_quantised_and_no_data() -> None:
    data = report()
    data |= {"calibration": None, "tensors": [], "worst": [], "sqnr_db": {"mean": None, "min": None}}
    text = Page(page(data)).text
    assert "Nothing is quantised." in text and "none: the recipe needs no data" in text
    assert "Perplexity" not in text and "Worst tensors" not in text


def test_stored_bytes_are_all_bytes() -> None:
    files = open_model(folder())
    rows = stored_bytes(files)
    assert sum(row.nbytes for row in rows) == files.tensor_bytes
    assert sum(row.share for row in rows) == pytest.approx(1)
    by_name = {row.stored: row for row in rows}
    report_tensors = json.loads((folder() / "jaxmoe_report.json").read_text(encoding="utf-8"))["tensors"]
    assert by_name["w8a8-g128"].tensors == len(report_tensors)


def test_stored_bytes_of_a_tensor_that_two_parameters_share() -> None:
    """gpt_oss fuses gate and up: its bytes count once."""
    files = open_model(tiny_folder("gpt_oss"))
    assert sum(row.nbytes for row in stored_bytes(files)) == files.tensor_bytes


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text(json.dumps(EVALUATION), encoding="utf-8")
    target = folder() / "report.html"
    assert main(["report", str(folder()), "--eval", str(result)]) == 0
    assert "report.html written" in capsys.readouterr().out
    assert "20.400" in Page(target.read_text(encoding="utf-8")).text
    assert main(["report", str(folder())]) == 0
    assert "20.400" not in target.read_text(encoding="utf-8")
    target.unlink()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no jaxmoe_report.json; give the folder that jaxmoe quantize wrote"):
        write_report_page(tiny_folder("glm4_moe"))
    with pytest.raises(ConfigError, match="is not one that jaxmoe wrote: KeyError 'source'"):
        report_page({}, [], title="x")
    with pytest.raises(
        ConfigError,
        match=r"the evaluation of tiny \(--eval\) is not one that jaxmoe eval --json wrote: KeyError 'ranges'",
    ):
        page(report(), {"perplexity": 3})


def test_layer_of() -> None:
    assert layer_of("model.layers.12.mlp.experts.3.up_proj.weight") == 12
    assert layer_of("lm_head.weight") is None


def test_chart_is_xml_and_places_points_in_order() -> None:
    series = [
        Series(name="a<b", xs=(0.0, 1.0, 2.0), ys=(10.0, 20.0, 15.0)),
        Series(name="none", xs=(), ys=()),
        Series(name="one", xs=(1.0,), ys=(-3.0,)),
    ]
    root = ElementTree.fromstring(line_chart(series, title="t & u", x_label="x", y_label="y"))
    space = "{http://www.w3.org/2000/svg}"
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{space}circle")]
    assert len(circles) == 4
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = circles
    assert x0 < x1 < x2 and x3 == x1
    assert y1 < y2 < y0 < y3, "larger values are higher"
    assert {"a<b", "none", "one", "t & u"} <= {t.text for t in root.iter(f"{space}text")}


def test_chart_of_one_value() -> None:
    text = line_chart([Series(name="a", xs=(3.0,), ys=(0.0,))], title="", x_label="", y_label="")
    assert "nan" not in text and "inf" not in text


def test_heat_map_holds_its_values() -> None:
    values = np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 0.25]])
    data = base64.b64decode(heat_map(values).partition(",")[2])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, lines = 8, b""
    while place < len(data):
        size, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + size]
        assert zlib.crc32(kind + body) == int.from_bytes(data[place + 8 + size : place + 12 + size], "big")
        lines += zlib.decompress(body) if kind == b"IDAT" else b""
        place += 12 + size
    rows = np.frombuffer(lines, np.uint8).reshape(2, 1 + 3 * 3)
    assert (rows[:, 0] == 0).all()
    red = rows[:, 1:].reshape(2, 3, 3)[..., 0]
    assert (red == np.rint(255 + values * (8 - 255))).all()
