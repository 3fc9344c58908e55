"""Commands on tiny checkpoints, in this process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxmoe import __version__
from jaxmoe.assets import asset
from jaxmoe.bench import int8
from jaxmoe.bench.int8 import Comparison
from jaxmoe.cli import COMMANDS, main
from jaxmoe.evals import setup
from jaxmoe.evals.perplexity import Evaluator
from jaxmoe.ptq.job import prepare
from jaxmoe.ptq.quantize import quantize
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.weights.load import open_model
from tests.commands import folders
from tests.commands.folders import jaxmoe

Capture = pytest.CaptureFixture[str]
PRESETS = sorted(path.stem for path in asset("configs").glob("models/*.json"))


def test_version_and_help(capsys: Capture) -> None:
    for arguments, expected in ((["--version"], f"jaxmoe {__version__}\n"), (["--help"], "quantize")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0 and expected in capsys.readouterr().out
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0 and f"usage: jaxmoe {command}" in capsys.readouterr().out


def test_quantize(capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("quantize", folders.model(), out, "--recipe", "w8a8-g128")
    dry = jaxmoe(capsys, *arguments, "--dry-run")
    assert (dry.code, dry.err) == (0, "") and not out.exists()
    for part in ("recipe w8a8-g128", "experts.gate", "attention.q", "host memory at most"):
        assert part in dry.out
    real = jaxmoe(capsys, *arguments)
    assert (real.code, real.err) == (0, "")
    assert f"{out}: " in real.out and "jaxmoe_report.json" in real.out and "layer 2 done" not in real.out
    assert re.search(r"\[DTS\] \d+ tasks on 1 worker in 1 process: wall", real.out)
    assert open_model(out).quantization is not None
    assert (out / "tokenizer.json").read_bytes() == (folders.model() / "tokenizer.json").read_bytes()


def test_plan_of_a_folder(capsys: Capture) -> None:
    outcome = jaxmoe(capsys, "plan", folders.model(), "--devices", 4)
    assert (outcome.code, outcome.err) == (0, "")
    for part in ("glm4_moe", "'expert': 4", "memory of one device", "routed experts", "keys and values: 240 bytes"):
        assert part in outcome.out
    assert "scales" not in outcome.out
    for arguments in ((folders.quantized(),), (folders.model(), "--recipe", "w8a8-g128")):
        assert "routed experts scales" in jaxmoe(capsys, "plan", *arguments).out
    assert jaxmoe(capsys, "plan", folders.model() / "config.json").code == 0


def test_plan_and_memory(capsys: Capture) -> None:
    fits = jaxmoe(capsys, "plan", folders.model(), "--memory", "1GiB")
    assert fits.code == 0 and "fits 1.00 GiB a device" in fits.out
    refusal = jaxmoe(capsys, "plan", folders.model(), "--memory", "100000")
    assert refusal.code == 2 and refusal.err.count("\n") == 1
    assert "there are 0.1 MiB per device; largest: " in refusal.err


@pytest.mark.skipif(not PRESETS, reason="no presets are shipped")
def test_plan_of_presets(capsys: Capture) -> None:
    assert {"hy4-preview", "deepseek-v3", "kimi-k2", "gpt-oss-120b"} <= set(PRESETS)
    for name in ("hy4-preview", "gpt-oss-120b", "hy_v4_tiny"):
        outcome = jaxmoe(capsys, "plan", name, "--recipe", "w8a8-g128", "--devices", 8)
        assert outcome.code == 0 and "routed experts scales" in outcome.out, (name, outcome.err)


def test_presets_without_weights(capsys: Capture, tmp_path: Path) -> None:
    """A dry run needs no weights; what needs them says so."""
    dry = jaxmoe(capsys, "quantize", "hy4-preview", tmp_path / "out", "--recipe", "w4a8-experts", "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert "w4a8-g128" in dry.out and "1453.08 GiB" in dry.out and not (tmp_path / "out").exists()
    for command in (("quantize", "hy4-preview", tmp_path / "out"), ("generate", "hy4-preview", "-p", "x")):
        outcome = jaxmoe(capsys, *command)
        assert outcome.code == 2 and "hy4-preview is a preset, a config without weights" in outcome.err


def test_quantize_with_calibration(capsys: Capture, text: Path, tmp_path: Path) -> None:
    sizes = ("--calib-samples", 3, "--calib-tokens", 8, 24, "--no-compile-cache")
    arguments = (folders.model(), tmp_path / "out", "--recipe", "w8a8-g128-smooth", "--calib", text, *sizes)
    outcome = jaxmoe(capsys, "quantize", *arguments, "--devices", 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert "calibration: 3 samples" in outcome.out and "experts in" in outcome.out
    assert [f"layer {layer} done, " in outcome.out for layer in range(4)] == [True, True, True, False]
    assert "tasks on 2 workers in 1 process" in outcome.out
    report = json.loads((tmp_path / "out" / "jaxmoe_report.json").read_text(encoding="utf-8"))
    assert report["calibration"]["samples"]["samples"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_quantize_is_taken_up(capsys: Capture, tmp_path: Path) -> None:
    """A run that ended early is not overwritten, goes on when it is told to, and only as it was started."""
    out = tmp_path / "out"
    arguments = ("quantize", folders.model(), out, "--no-compile-cache")
    plain = ("--recipe", "w8a8-g128")

    def stop(_done: float, _total: float, _task: str) -> None:
        raise KeyboardInterrupt

    job = prepare(folders.model(), load_recipe("w8a8-g128"))
    with pytest.raises(KeyboardInterrupt):
        quantize(job, out, progress=stop)
    for more, message in (
        (plain, f"{out}.partial holds an unfinished run; give --resume to take it up, or remove it"),
        (("--resume", "--recipe", "w8a8-g64"), "holds an unfinished run with another recipe, layout; it cannot be"),
    ):
        outcome = jaxmoe(capsys, *arguments, *more)
        assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1
    outcome = jaxmoe(capsys, *arguments, *plain, "--resume")
    assert (outcome.code, outcome.err) == (0, "") and " done before) on 1 worker" in outcome.out
    for path in folders.quantized().iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_quantize_for_other_engines(capsys: Capture, text: Path, tmp_path: Path) -> None:
    """In the format that is asked for; an engine that could not load the result refuses it before any work."""
    sizes = ("--calib", text, "--calib-samples", 2, "--calib-tokens", 8, 16, "--no-compile-cache")
    channel = ("quantize", folders.model(), tmp_path / "out", "--recipe", "w8a8-channel", *sizes)
    outcome = jaxmoe(capsys, *channel, "--format", "ascendv1")
    assert (outcome.code, outcome.err) == (0, "") and "written as ascendv1" in outcome.out
    assert (tmp_path / "out" / "quant_model_description.json").exists()
    assert (tmp_path / "out" / "quant_model_weights.safetensors.index.json").exists()
    for target in ("vllm", "vllm-ascend"):
        arguments = ("quantize", folders.model(), tmp_path / "no", "--target", target, "--no-compile-cache")
        refused = jaxmoe(capsys, *arguments, "--recipe", "w8a8-g128")
        assert refused.code == 2 and "w8a8-g128" in refused.err and refused.err.count("\n") == 1
    assert not list(tmp_path.glob("no*"))


def test_calibration_that_cannot_be(capsys: Capture, tmp_path: Path) -> None:
    """Bad data is refused before anything is written."""
    out = tmp_path / "out"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"texts": "not"}\n', encoding="utf-8")
    smooth = ("quantize", folders.model(), out, "--recipe", "w8a8-g128-smooth", "--no-compile-cache")
    for arguments, message in (
        ((*smooth, "--calib", tmp_path / "absent.txt"), "absent.txt"),
        ((*smooth, "--calib", broken), "broken.jsonl"),
        ((*smooth, "--devices", 0), "--devices 0 is below 1"),
        (("quantize", folders.model(), out, "--calib", broken, "--recipe", "w8a8-g128"), "takes no --calib data"),
    ):
        outcome = jaxmoe(capsys, *arguments)
        assert outcome.code == 2 and message in outcome.err, outcome
    assert not out.exists()


def test_generate(capsys: Capture) -> None:
    options = ("--max-tokens", 5, "--profile", folders.profile(), "--no-compile-cache", "--chat", "--poison")
    prompts = ("-p", "hello [bold]there", "-p", "something else that is longer")
    outcome = jaxmoe(capsys, "generate", folders.quantized(), *prompts, *options)
    assert (outcome.code, outcome.err) == (0, "")
    assert "> hello [bold]there\n" in outcome.out and "> something else that is longer\n" in outcome.out
    assert "compilations after warm-up 0, pages in use 0" in outcome.out


@pytest.fixture(scope="module")
def text() -> Path:
    path = folders.scratch() / "eval.txt"
    path.write_text("".join(chr(33 + i * i % 90) for i in range(200)), encoding="utf-8")
    return path


def test_eval_against_a_baseline(capsys: Capture, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = ("--text", text, "--windows", 2, "--window-tokens", 32, "--chunk", 16, "--no-compile-cache")
    gates, report = tmp_path / "gates.toml", tmp_path / "result.json"
    gates.write_text("[w8a8]\nmax_perplexity_increase = 1.0\nmax_range_increase = 1.0\n", encoding="utf-8")
    arguments = (folders.quantized(), "--baseline", folders.model(), *cut, "--gates", gates, "--json", report)
    kept: list[Evaluator] = []
    build = setup.build_evaluator

    def once(*args: Any, **options: Any) -> Evaluator:
        """The second run reuses the first one's programs."""
        if not kept:
            kept.append(build(*args, **options))
        return kept[0]

    monkeypatch.setattr(setup, "build_evaluator", once)
    passed = jaxmoe(capsys, "eval", *arguments)
    assert (passed.code, passed.err) == (0, "")
    assert "gate w8a8 passed" in passed.out and "router agreement" in passed.out
    data = json.loads(report.read_text(encoding="utf-8"))
    assert data["kind"] == "w8a8" and (data["windows"], data["window_tokens"]) == (2, 32)
    assert data["overall"]["tokens"] == 64
    assert data["overall"]["perplexity"] > 1 and data["overall"]["baseline_perplexity"] > 1
    assert 0 <= data["overall"]["kl"] < 1 and 0.5 < data["router_agreement"] <= 1
    assert [(part["start"], part["stop"]) for part in data["ranges"]] == [(0, 512)]
    gates.write_text("[w8a8]\nmax_perplexity_increase = -0.9\nmax_range_increase = -0.9\n", encoding="utf-8")
    failed = jaxmoe(capsys, "eval", *arguments)
    assert (failed.code, failed.err) == (1, "")
    assert "gate w8a8 failed: overall: perplexity" in failed.out and "the limit is -90.00%" in failed.out


@pytest.mark.parametrize(("milliseconds", "code"), [(1.0, 0), (9.0, 1)])
def test_doctor(capsys: Capture, monkeypatch: pytest.MonkeyPatch, milliseconds: float, code: int) -> None:
    """The verdict, not the clock, is tested."""
    row = Comparison(tokens=8, float_ms=3.0, int8_ms=milliseconds, error=0.01)
    monkeypatch.setattr(int8, "compare_int8", lambda: iter([row]))
    outcome = jaxmoe_doctor(capsys)
    assert (outcome.code, outcome.err) == (code, "")
    assert f"jaxmoe {__version__}" in outcome.out and "8 devices: cpu" in outcome.out
    assert ("SLOWER" in outcome.out) == bool(code)
    for shape in ("step 1 x 1: ", "step 1 x 16: "):
        assert shape in outcome.out


def jaxmoe_doctor(capsys: Capture) -> folders.Outcome:
    return folders.jaxmoe(capsys, "doctor", folders.quantized(), "--profile", folders.profile(), "--no-compile-cache")


def test_real_comparison_of_int8_and_float() -> None:
    (row,) = int8.compare_int8((8,))
    assert row.tokens == 8 and row.float_ms > 0 and row.int8_ms > 0
    assert 0 < row.error < 0.05
