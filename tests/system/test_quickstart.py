"""The README's main command, whole, as a process of its own; and the demo model's gates one by one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run_jaxmoe(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, "-m", "jaxmoe", *arguments]
    environment["COLUMNS"] = "160"
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("quickstart") / "demo"
    result = run_jaxmoe("quickstart", "--dir", str(folder), "--no-compile-cache")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return folder, result.stdout


def test_quickstart_prints_its_table(demo: tuple[Path, str]) -> None:
    _, output = demo
    assert re.search(r"compilations after warm-up\W+0\W", output)
    assert re.search(r"pages in use at the end\W+0\W", output)
    assert "gate w8a8 passed" in output
    assert "Paris" in output
    peak = re.search(r"memory: ledger, peak.*\((\d+)%\)", output)
    assert peak is not None and 90 <= int(peak[1]) <= 110, peak


def test_quickstart_again_reuses_what_is_there(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    result = run_jaxmoe(
        "quickstart", "--dir", str(folder), "--windows", "8", "--window-tokens", "64", "--max-tokens", "4"
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("is there already") == 2


@pytest.mark.parametrize("what", ["kv_int8", "w8a16"])
def test_int8_cache_alone_and_int8_weights_alone_cost_almost_nothing(
    demo: tuple[Path, str], what: str, tmp_path: Path
) -> None:
    folder, _ = demo
    source = folder / "smollm2-moe"
    model, cache = source, "int8"
    if what == "w8a16":
        model, cache = tmp_path / "weights-only", "float32"
        assert run_jaxmoe("quantize", str(source), str(model), "--recipe", "w8a16-g128").returncode == 0
    result = run_jaxmoe(
        *("eval", str(model), "--baseline", str(source), "--kv-cache", cache, "--devices", "8"),
        # Nearly the whole bundled text: on a third of it the noise is as large as what is measured.
        *("--windows", "10", "--window-tokens", "4096", "--json", str(tmp_path / "result.json")),
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["kind"] == what
    assert f"gate {what} passed" in result.stdout
