"""Quantisation by real processes: killed and taken up, two at once, one of two that dies."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxmoe.ptq.quantize import partial_folder
from tests.commands import folders
from tests.ptq.jobs import digest, documents, finished
from tests.ptq.tasks.graphs import free_address
from tests.running import tiny_folder

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 120.0
GLM = "glm4_moe"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m MODULE ARGUMENTS`; none is left when the test ends."""
    running: list[subprocess.Popen[str]] = []

    def started(module: str, *arguments: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.pop("JAX_NUM_CPU_DEVICES", None)
        words = [sys.executable, "-W", "error", "-m", module, *map(str, arguments)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, cwd=_ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        running.append(process)
        return process

    yield started
    for process in running:
        process.kill()
        process.communicate()


PLAIN = ("--recipe", "w8a8-g128")
Start = Callable[..., subprocess.Popen[str]]


def end(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What a process says; it ends in time, with this code, and without a traceback."""
    out, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == code and "Traceback" not in err, (process.returncode, out, err)
    return out, err


def quantize(start: Start, *arguments: object) -> subprocess.Popen[str]:
    return start("jaxmoe", "quantize", *arguments, "--no-compile-cache")


def without_page(out: Path) -> dict[str, str]:
    """A command's result but for the page for people, which `quantize()` does not write."""
    files = digest(out)
    files.pop("report.html", None)
    return files


def records(out: Path) -> int:
    return len(list((partial_folder(out) / "tasks").glob("*.json")))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_one_that_ends_early(start: Start, sent: signal.Signals, code: int, tmp_path: Path) -> None:
    """Killed, or told to stop, in the middle of its tasks; another process takes them up."""
    out = tmp_path / "out"
    process, until = quantize(start, tiny_folder(GLM), out, *PLAIN), time.monotonic() + _PATIENCE_S
    while records(out) < 25:
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.005)
    process.send_signal(sent)
    end(process, code)
    assert not out.exists() and records(out) >= 25
    _, err = end(quantize(start, tiny_folder(GLM), out, *PLAIN), 2)
    assert "give --resume" in err and err.count("\n") == 1
    text, _ = end(quantize(start, tiny_folder(GLM), out, *PLAIN, "--resume"))
    assert re.search(r"\(\d+ done before\)", text), text
    assert without_page(out) == digest(finished(GLM, "w8a8-g128"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
def test_two_write_what_one_writes(start: Start, calibrated: bool, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(bytes((document.ids % 96 + 32).tolist()) for document in documents()))
    sizes = ("--calib-samples", 12, "--calib-tokens", 4, 40)
    options = ("--recipe", "w8a8-g128-smooth", "--calib", text, *sizes) if calibrated else PLAIN
    address = free_address()
    pair = ("--coordinator", address.removeprefix("tcp://"), "--processes", 2, "--process-id")
    one, two = tmp_path / "one" / "out", tmp_path / "two" / "out"
    one.parent.mkdir()
    two.parent.mkdir()
    helper = quantize(start, folders.model(), two, *options, *pair, 1)
    server = quantize(start, folders.model(), two, *options, *pair, 0)
    said, _ = end(server)
    helped, _ = end(helper)
    assert "2 workers in 2 processes" in said and "2 workers in 2 processes" in helped, (said, helped)
    assert f"{two}: " in said and f"{two}: " not in helped
    end(quantize(start, folders.model(), one, *options, "--devices", 2))
    assert digest(two) == digest(one)
    assert [path.name for each in (one, two) for path in each.parent.iterdir()] == ["out", "out"]


def test_another_recipe_in_the_other_process(start: Start, tmp_path: Path) -> None:
    """It is told what differs, and leaves."""
    pair = ("--coordinator", free_address(), "--processes", 2, "--process-id")
    out = tmp_path / "out"
    helper = quantize(start, tiny_folder(GLM), out, "--recipe", "w8a8-g64", *pair, 1)
    server = quantize(start, tiny_folder(GLM), out, *PLAIN, *pair, 0)
    _, err = end(helper, 2)
    assert "semantic mismatch" in err and "start all processes with the same model, recipe, data" in err
    assert server.poll() is None, "the one with the queue goes on"


def test_one_of_two_dies(start: Start, tmp_path: Path) -> None:
    """With tasks that it has written and not recorded: they are done again by the other."""
    out, address = tmp_path / "out", free_address()
    helper = start("tests.ptq.process", tiny_folder(GLM), out, address, "help", 5)
    server = start("tests.ptq.process", tiny_folder(GLM), out, address, "serve")
    end(helper, -signal.SIGKILL)
    said, _ = end(server)
    here, tasks = map(int, re.findall(r"\d+", said))
    assert here < tasks, "the other had done some"
    assert without_page(out) == digest(finished(GLM, "w8a8-g128"))


def test_the_one_with_the_queue_dies(start: Start, tmp_path: Path) -> None:
    """The other says so and leaves; a new pair takes the run up."""
    out, address = tmp_path / "out", free_address()
    helper = start("tests.ptq.process", tiny_folder(GLM), out, address, "help")
    server = start("tests.ptq.process", tiny_folder(GLM), out, address, "serve", 2)
    end(server, -signal.SIGKILL)
    _, err = helper.communicate(timeout=_PATIENCE_S)
    assert helper.returncode == 1 and not out.exists()
    assert f"the task server at {address} has not answered" in err
    done = records(out)
    assert done > 1, "both had done some"
    text, _ = end(quantize(start, tiny_folder(GLM), out, *PLAIN, "--resume"))
    assert f"({done} done before)" in text
    assert without_page(out) == digest(finished(GLM, "w8a8-g128"))
