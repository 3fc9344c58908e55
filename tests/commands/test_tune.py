"""jaxmoe tune: the order of trials, the gate, and that no trial is done twice."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxmoe.commands import eval as eval_command
from jaxmoe.errors import ConfigError
from jaxmoe.ptq.actions import WritePart
from jaxmoe.ptq.graph import MOST_EXPERT_TASKS
from jaxmoe.ptq.job import make_job
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.ptq.report import REPORT_NAME
from jaxmoe.ptq.verify import verify
from jaxmoe.weights.load import open_model
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
    assert "the smallest that holds the gate" in passed.out
    assert "w8a8-g128" not in passed.out, "the second one is not looked at"
    (folder,) = (tmp_path / "out").glob("w4a8-experts-*")
    assert f"{folder}: the smallest" in passed.out
    assert json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))["recipe"]["name"] == "w4a8-experts"
    # What a run left that was killed when it removed a result is no result.

    def killed_early(folder: Path, **_: object) -> None:
        for path in sorted(folder.glob("*.safetensors"))[:1]:
            path.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed_early)
        assert jaxmoe(capsys, "tune", *arguments, *recipes, "--gate", "never").code == 1
    assert not folder.exists()
    assert jaxmoe(capsys, "tune", *arguments, *recipes, "--gate", "always").code == 0
    assert verify(folder, folders.model()).passed
    # Other text is another trial.
    other = tmp_path / "text.txt"
    other.write_text("Something else, and that is what is evaluated. " * 4, encoding="utf-8")
    with pytest.raises(AssertionError, match="measured before"):
        jaxmoe(capsys, "tune", *arguments, *recipes, "--gate", "always")


@pytest.mark.slow
def test_a_folder_is_of_the_data_whose_numbers_are_told(
    capsys: Capture, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    """X, then Y, then X again: the third run knows X's numbers, and names X's weights."""
    made = {}
    for name, said in (("x", "Some text to look at. "), ("y", "Of quite another kind! "), ("x", "")):
        data = tmp_path / f"{name}.txt"
        if said:
            data.write_text(said * 40, encoding="utf-8")
        calibration = ("--calib", data, "--calib-samples", 3, "--calib-tokens", 8, 24)
        more = ("--recipes", "w8a8-g128-smooth", "--gate", "always", *calibration)
        outcome = jaxmoe(capsys, "tune", *arguments, *more)
        assert (outcome.code, outcome.err) == (0, "")
        folder = Path(outcome.out.rpartition(": the smallest")[0].rpartition("\n")[2])
        sha = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))["calibration"]["data_sha256"]
        assert made.setdefault(name, (folder, sha)) == (folder, sha)
    assert made["x"][0] != made["y"][0] and made["x"][1] != made["y"][1]
    assert len(json.loads((tmp_path / "out" / "history.json").read_text(encoding="utf-8"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("place", ["while it quantises", "while it evaluates"])
def test_a_killed_trial_is_taken_up(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[object, ...], place: str
) -> None:
    more = ("--recipes", "w8a8-g128", "--gate", "always")
    quantises = place == "while it quantises"
    run_part, parts = WritePart.run, list[int]()

    def killed_part(self: WritePart, context: Any, device: Any) -> Any:
        parts.append(1)
        if len(parts) == 5 and quantises:
            raise ConfigError("killed")
        return run_part(self, context, device)

    def killed_measure(*_args: object) -> None:
        raise ConfigError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(WritePart, "run", killed_part)
        patch.setattr(eval_command, "measure", killed_measure)
        outcome = jaxmoe(capsys, "tune", *arguments, *more)
    assert outcome.code == 2 and "killed" in outcome.err
    out = tmp_path / "out"
    assert json.loads((out / "history.json").read_text(encoding="utf-8")) == {}
    (left,) = out.glob("w8a8-*")
    assert left.name.endswith(".partial") == quantises
    before = len(parts)
    monkeypatch.setattr(WritePart, "run", killed_part)
    quantises = False
    again = jaxmoe(capsys, "tune", *arguments, *more)
    assert (again.code, again.err) == (0, "")
    (folder,) = out.glob("w8a8-*")
    job = make_job(open_model(folders.model()), load_recipe("w8a8-g128"))
    whole = sum(min(len(part.cells), MOST_EXPERT_TASKS) for part in job.parts)
    # Of a run that was killed four parts are done; of one that was evaluated, all.
    assert len(parts) - before == (whole - 4 if place == "while it quantises" else 0)
    assert (folder / REPORT_NAME).exists()


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("no gate 'w9'; there are never, always", ("--recipes", "w8a8-g128", "--gate", "w9")),
        ("no recipe 'w9'", ("--recipes", "w8a8-g128,w9", "--gate", "never")),
        ("two recipes have the same name", ("--recipes", "w8a8-g128,w8a8-g128", "--gate", "never")),
        (
            "none of the recipes w8a8-g128 is calibrated",
            ("--recipes", "w8a8-g128", "--gate", "never", "--calib-samples", 3),
        ),
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
