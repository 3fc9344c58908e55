"""jaxmoe analyze: what it writes, prints and refuses."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from jaxmoe.ptq.recipe import load_recipe, match_recipe
from jaxmoe.weights.load import open_model
from tests.commands import folders
from tests.commands.folders import jaxmoe

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_analyze(capsys: Capture, tmp_path: Path) -> None:
    out, data = tmp_path / "out", tmp_path / "data.txt"
    data.write_text("Some text to look at. " * 40, encoding="utf-8")
    model = folders.model()
    arguments = (
        "--no-compile-cache",
        "--calib",
        data,
        "--calib-samples",
        3,
        "--calib-tokens",
        8,
        24,
        "--schemes",
        "w8a8-g128,w4a8-g128",
    )
    outcome = jaxmoe(
        capsys, "analyze", model, "-o", out, *arguments, "--budget", "0.4MB", "--metric", "error w4a8-g128"
    )
    assert outcome.code == 0, outcome.err
    assert "linear layers, most sensitive by error w4a8-g128" in outcome.out
    assert "suggested for 400,000 bytes" in outcome.out
    assert "calibration: 3 samples, " in outcome.out and " tokens of 1 domains" in outcome.out
    analysis = json.loads((out / "analysis.json").read_text(encoding="utf-8"))
    assert yaml.safe_load((out / "ranking.yaml").read_text(encoding="utf-8")) == analysis["ranking"]
    assert analysis["calibration"]["samples"] == 3
    charts = {"kurtosis.svg", "layers.svg", "error-w8a8-g128.svg", "error-w4a8-g128.svg"}
    assert {path.name for path in out.iterdir()} == {"analysis.json", "ranking.yaml", "recipe.toml", *charts}
    for name in charts:
        ElementTree.parse(out / name)
    assert match_recipe(load_recipe(str(out / "recipe.toml")), open_model(model).manifest)
    again = jaxmoe(capsys, "analyze", model, "-o", out, *arguments)
    assert again.code == 2 and "exists already and is not an empty folder" in again.err


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("unknown scheme 'w3a8'", ("--schemes", "w3a8")),
        ("names a scheme twice", ("--schemes", "w8a8-g128,w8a8-g128")),
        ("--metric 'mse' is none of std, quantile, kurtosis, error w8a8-channel,", ("--metric", "mse")),
        ("'much' is no amount of memory", ("--budget", "much")),
        (
            "none of w8a8-g128 has 16-bit activations",
            ("--schemes", "w8a8-g128", "--budget", "1MB", "--activation-bits", 16),
        ),
        ("--activation-bits 8 is of the suggested recipe: give --budget too", ("--activation-bits", 8)),
        ("a budget of 1,000 bytes is too small", ("--budget", "1000")),
        ("--top-k 0 is below 1", ("--top-k", 0)),
        ("absent.txt", ("--calib", "absent.txt")),
    ],
)
def test_bad_input_is_refused_before_any_work(
    capsys: Capture, tmp_path: Path, message: str, arguments: tuple[object, ...]
) -> None:
    out = tmp_path / "out"
    outcome = jaxmoe(capsys, "analyze", folders.model(), "-o", out, "--no-compile-cache", *arguments)
    assert outcome.code == 2 and message in outcome.err, outcome.err
    assert not out.exists()


def test_integers_are_refused(capsys: Capture, tmp_path: Path) -> None:
    outcome = jaxmoe(capsys, "analyze", folders.quantized(), "-o", tmp_path / "out", "--no-compile-cache")
    assert outcome.code == 2 and "is quantised already" in outcome.err
