"""Bad input: exit code 2 and one line on standard error that names what is wrong, never a traceback."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxmoe.assets import asset
from jaxmoe.engine.engine import Engine
from tests.commands import folders
from tests.commands.folders import jaxmoe

Capture = pytest.CaptureFixture[str]
GENERATE = ("--max-tokens", 2, "--no-compile-cache")
READERS: dict[str, tuple[object, ...]] = {
    "quantize": ("OUT", "--dry-run"),
    "generate": ("-p", "hello", *GENERATE),
    "eval": ("--no-compile-cache",),
}
"""Commands that open a checkpoint."""


def refused(capsys: Capture, message: str, command: str, *arguments: object) -> None:
    """The command ends with 2 and one line that says `message`."""
    outcome = jaxmoe(capsys, command, *arguments)
    assert outcome.code == 2
    assert re.fullmatch(rf"jaxmoe {command}: .*\n", outcome.err), outcome.err
    assert re.search(message, outcome.err), outcome.err
    assert "Traceback" not in outcome.out + outcome.err


def refused_by_readers(capsys: Capture, message: str, model: Path, out: Path) -> None:
    for command, rest in READERS.items():
        refused(capsys, message, command, model, *(out if part == "OUT" else part for part in rest))
    assert not out.exists()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(folders.model(), tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_missing_folder(capsys: Capture, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    refused(capsys, f"{absent} is not a folder", "quantize", absent, tmp_path / "out")
    refused(capsys, f"{absent} is not a folder", "generate", absent, *READERS["generate"])
    refused(capsys, f"{absent} is not a folder", "eval", absent, *READERS["eval"])
    neither = f"{absent} is no folder, no config.json and no preset"
    refused(capsys, neither, "quantize", absent, tmp_path / "out", "--dry-run")
    refused(capsys, neither, "plan", absent)


def test_folder_without_config(capsys: Capture, tmp_path: Path) -> None:
    refused_by_readers(capsys, f"{tmp_path}/config.json does not exist", tmp_path, tmp_path / "out")
    refused(capsys, f"{tmp_path}/config.json does not exist", "plan", tmp_path)


def test_missing_shard(capsys: Capture, own: Path, tmp_path: Path) -> None:
    shard = sorted(own.glob("*.safetensors"))[1]
    shard.unlink()
    refused_by_readers(capsys, re.escape(shard.name), own, tmp_path / "out")


def test_truncated_shard(capsys: Capture, own: Path, tmp_path: Path) -> None:
    shard = sorted(own.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused_by_readers(capsys, re.escape(shard.name), own, tmp_path / "out")


def test_unknown_model_type(capsys: Capture, own: Path, tmp_path: Path) -> None:
    change_config(own, model_type="gpt2")
    message = "model_type 'gpt2' is not supported; supported: deepseek_v2"
    refused_by_readers(capsys, message, own, tmp_path / "out")
    refused(capsys, message, "plan", own)


def test_unknown_config_key(capsys: Capture, own: Path, tmp_path: Path) -> None:
    change_config(own, use_magic=True)
    refused_by_readers(capsys, "unknown key use_magic", own, tmp_path / "out")
    refused(capsys, "unknown key use_magic", "plan", own)


def test_illegal_group_size_in_a_recipe(capsys: Capture, tmp_path: Path) -> None:
    text = asset("configs", "quant", "w8a8-g128.toml").read_text(encoding="utf-8")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text.replace('scheme = "w8a8-g128"', 'scheme = "w8a8-g100"'), encoding="utf-8")
    message = r"rule 2 for tensor model\.layers\.\d.*: scheme 'w8a8-g100': a group of 100 is not one of 32"
    refused(capsys, message, "quantize", folders.model(), tmp_path / "out", "--recipe", recipe)
    refused(capsys, message, "plan", folders.model(), "--recipe", recipe)
    assert not (tmp_path / "out").exists()


def test_unknown_recipe(capsys: Capture, tmp_path: Path) -> None:
    message = "no recipe 'w3'; known are .*w8a8-g128"
    refused(capsys, message, "quantize", folders.model(), tmp_path / "out", "--recipe", "w3")


def test_output_that_is_there(capsys: Capture, own: Path) -> None:
    refused(capsys, f"{own} exists already", "quantize", folders.model(), own, "--dry-run")


def test_quantised_source(capsys: Capture, tmp_path: Path) -> None:
    refused(capsys, "is quantised already", "quantize", folders.quantized(), tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--processes", 2), "--coordinator, --processes and --process-id go together: give all three or none"),
        (
            ("--coordinator", "127.0.0.1:1", "--processes", 2, "--process-id", 2),
            "--process-id 2 is not one of 0 to 1",
        ),
        (
            ("--coordinator", "nowhere", "--processes", 2, "--process-id", 0),
            "--coordinator nowhere: give HOST:PORT of process 0",
        ),
        (("--devices", "0,0"), "--devices 0,0: a list names each device once"),
        (("--devices", "many"), "--devices many: give a number, 'all', or a list such as 0,1,2"),
        (("--devices", "7,8"), "--devices: no device 8; this process has 8, counted from 0"),
        (("--tp", "one"), "--tp one: give degrees of tensor parallelism such as 1,2,4,8"),
        (("--quant-type", "w4a4"), "w4a4"),
    ],
)
def test_options_of_quantize(capsys: Capture, options: tuple[object, ...], message: str, tmp_path: Path) -> None:
    refused(capsys, message, "quantize", folders.model(), tmp_path / "out", *options, "--no-compile-cache")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("devices", "message"), [(16, "needs 16 devices, this process has 8"), (0, "0 is below 1")])
def test_devices(capsys: Capture, devices: int, message: str) -> None:
    for command, rest in (("generate", READERS["generate"]), ("eval", (*READERS["eval"], *short_text()))):
        refused(capsys, message, command, folders.model(), *rest, "--devices", devices)


def short_text() -> tuple[object, ...]:
    path = folders.scratch() / "short.txt"
    path.write_text("It is a truth universally acknowledged. " * 4, encoding="utf-8")
    return ("--text", path, "--windows", 2, "--window-tokens", 32, "--chunk", 16)


def test_plan_that_does_not_scale(capsys: Capture, tmp_path: Path) -> None:
    plan = tmp_path / "fixed.toml"
    rules = '[mesh]\nexpert = 8\n[rules]\ntokens = ["expert"]\npages = ["expert"]\nexperts = []\nvocab = []\n'
    plan.write_text(rules, encoding="utf-8")
    refused(capsys, f"{plan}: .*cannot be put on 4 devices", "plan", folders.model(), "--plan", plan, "--devices", 4)
    plan.write_text(rules.replace("experts = []\n", ""), encoding="utf-8")
    refused(capsys, f"{plan}: no rule for axis experts", "plan", folders.model(), "--plan", plan)


def test_prompts_that_cannot_run(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs, so nothing has to be compiled here."""
    monkeypatch.setattr(Engine, "warm_up", lambda _engine: None)
    options = (*GENERATE, "--profile", folders.profile())
    refused(capsys, "the prompt is empty", "generate", folders.model(), "-p", "fine", "-p", "", *options)
    message = "prompt of 80 tokens .* max_tokens 2 is more than the limit of 64 tokens"
    refused(capsys, message, "generate", folders.model(), "-p", "x" * 80, *options)


def test_sampling_out_of_range(capsys: Capture) -> None:
    refused(capsys, "top_p = 3.0", "generate", folders.model(), *READERS["generate"], "--top-p", 3)


def test_no_tokenizer(capsys: Capture, own: Path) -> None:
    (own / "tokenizer.json").unlink()
    (own / "tokenizer_config.json").unlink()
    refused(capsys, f"{own} has no tokenizer.json", "generate", own, *READERS["generate"])


def test_damaged_tokenizer(capsys: Capture, own: Path) -> None:
    (own / "tokenizer.json").write_text("{", encoding="utf-8")
    refused(capsys, f"{own}: the tokenizer cannot be read", "generate", own, *READERS["generate"])


def test_profiles(capsys: Capture, tmp_path: Path) -> None:
    refused(capsys, "configs/serve/fast.toml is not shipped", "plan", folders.model(), "--profile", "fast")
    refused(
        capsys,
        "5 pages of 16 tokens .* hold 64 tokens, max_context_tokens is 2048",
        "plan",
        folders.model(),
        "--pages",
        5,
    )
    path = tmp_path / "mine.toml"
    path.write_text("page_sise = 8\n", encoding="utf-8")
    refused(capsys, "unknown key page_sise", "plan", folders.model(), "--profile", path)


@pytest.mark.parametrize("text", ["many", "64 bananas", "inf", "nan", "", "GiB"])
def test_amounts_of_memory(capsys: Capture, text: str) -> None:
    refused(capsys, f"'{text}' is no amount of memory", "plan", folders.model(), "--memory", text)


def test_evaluation_text(capsys: Capture, tmp_path: Path) -> None:
    rest = ("--no-compile-cache", "--windows", 2)
    absent = tmp_path / "absent.txt"
    refused(capsys, f"{absent} is not readable", "eval", folders.model(), "--text", absent, *rest)
    short = short_text()[1]
    message = r"2 windows of 100 tokens asked for, the text holds 1 \(short 1\)"
    refused(capsys, message, "eval", folders.model(), "--text", short, *rest, "--window-tokens", 100)
    refused(capsys, "must be at least 1", "eval", folders.model(), "--text", short, *rest, "--chunk", 0)


def test_gates_without_the_kind(capsys: Capture, tmp_path: Path) -> None:
    gates = tmp_path / "gates.toml"
    gates.write_text("[w8a8]\nmax_perplexity_increase = 1\nmax_range_increase = 1\n", encoding="utf-8")
    arguments = (folders.model(), *READERS["eval"], *short_text(), "--gates", gates)
    refused(capsys, rf"{gates} has no gate \[float\]", "eval", *arguments)
