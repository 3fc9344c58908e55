"""jaxmoe tune: the order of trials, the gate, and that no trial is done twice."""

import json
from pathlib import Path

import pytest

from jaxmoe.commands import eval as eval_command
from tests.commands import folders
from tests.commands.folders import jaxmoe

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    path = tmp_path / "gates.toml"
    limits = {"never": -0.9, "always": 10.0}
    text = "".join(
        f"[{name}]\nmax_perplexity_increase = {limit}\nmax_range_increase = {limit}\n" for name, limit in limits.items()
    )
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def arguments(tmp_path: Path, gates: Path) -> tuple[object, ...]:
    text = tmp_path / "text.txt"
    text.write_text("All that is written here is evaluated. " * 4, encoding="utf-8")
    sizes = ("--windows", 1, "--window-tokens", 32, "--chunk", 16, "--no-compile-cache")
    return (folders.model(), tmp_path / "out", "--gates", gates, "--text", text, *sizes)


@pytest.mark.slow
def test_smallest_first_and_nothing_twice(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    recipes = ("--recipes", "w8a8-g128,w4a8-experts")
    failed = jaxmoe(capsys, "tune", *arguments, *recipes, "--gate", "never")
    assert (failed.code, failed.err) == (1, "")
    assert "no recipe holds the gate" in failed.out
    trials = list(json.loads((tmp_path / "out" / "history.json").read_text(encoding="utf-8")).values())
    assert [trial["recipe"] for trial in trials] == ["w4a8-experts", "w8a8-g128"]
    assert trials[0]["bytes"] < trials[1]["bytes"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"history.json"}, "what failed takes no space"

    def measured_again(*_args: object) -> None:
        raise AssertionError("this was measured before")

    monkeypatch.setattr(eval_command, "measure", measured_again)
    passed = jaxmoe(capsys, "tune", *arguments, *recipes, "--gate", "always")
    assert (passed.code, passed.err) == (0, "")
    assert "w4a8-experts: the smallest that holds the gate" in passed.out
    assert "w8a8-g128" not in passed.out, "the second one is not looked at"
    report = json.loads((tmp_path / "out" / "w4a8-experts" / "jaxmoe_report.json").read_text(encoding="utf-8"))
    assert report["recipe"]["name"] == "w4a8-experts"
    # Other text is another trial.
    other = tmp_path / "text.txt"
    other.write_text("Something else, and that is what is evaluated. " * 4, encoding="utf-8")
    with pytest.raises(AssertionError, match="measured before"):
        jaxmoe(capsys, "tune", *arguments, *recipes, "--gate", "always")


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("no gate 'w9'; there are never, always", ("--recipes", "w8a8-g128", "--gate", "w9")),
        ("no recipe 'w9'", ("--recipes", "w8a8-g128,w9", "--gate", "never")),
        ("two recipes have the same name", ("--recipes", "w8a8-g128,w8a8-g128", "--gate", "never")),
        ("must be at least 1", ("--recipes", "w8a8-g128", "--gate", "never", "--windows", 0)),
    ],
)
def test_bad_input(
    capsys: Capture, tmp_path: Path, arguments: tuple[object, ...], message: str, more: tuple[object, ...]
) -> None:
    outcome = jaxmoe(capsys, "tune", *arguments, *more)
    assert outcome.code == 2 and message in outcome.err, outcome.err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else(capsys: Capture, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine", encoding="utf-8")
    outcome = jaxmoe(capsys, "tune", *arguments, "--recipes", "w8a8-g128", "--gate", "never")
    assert outcome.code == 2 and "is not empty and holds no history.json" in outcome.err
    assert (tmp_path / "out" / "mine.txt").exists()
