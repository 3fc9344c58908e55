"""Real processes that share a folder and a queue, and what happens when they die."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ptq.tasks.graphs import free_address
from tests.ptq.tasks.process import grid, hash_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(60)]

_ROOT = Path(__file__).resolve().parents[3]
_PATIENCE_S = 20.0


class Run:
    """Some processes with one folder and one address."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.address = free_address()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, **options: Any) -> subprocess.Popen[str]:
        arguments = [str(self.folder), self.address, role, *(f"{name}={value}" for name, value in options.items())]
        command = [sys.executable, "-X", "dev", "-W", "error", "-m", "tests.ptq.tasks.process", *arguments]
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str], code: int = 0, timeout_s: float = _PATIENCE_S) -> dict[str, Any]:
        """What a process says at its end, which comes in time, with this exit code and everything closed."""
        out, err = process.communicate(timeout=timeout_s)
        assert process.returncode == code, (process.returncode, out, err)
        assert "Warning" not in err and "Traceback" not in err, err
        return json.loads(out)

    def started(self, task: str) -> list[int]:
        """Processes that have started a task."""
        return [int(path.name.rpartition(" ")[2]) for path in self.folder.glob(f"started {task} *")]

    def tasks_of(self, process: subprocess.Popen[str]) -> list[str]:
        """Tasks that a process has started."""
        names = [path.name for path in self.folder.glob(f"started * {process.pid}")]
        return [name.removeprefix("started ").rpartition(" ")[0] for name in names]

    def check_files(self, layers: int = 5, width: int = 8) -> None:
        """Each file has the bytes that one worker alone would have written."""
        texts: dict[str, str] = {}
        for task in grid(layers, width):
            (name,) = task.writes
            texts[name] = f"{name}({hash_of([texts[read] for read in sorted(task.reads)])})"
        found = {name: (self.folder / name).read_text() for name in texts}
        assert found == texts


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for process in run.processes:
        process.kill()
        process.communicate()


def _wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)
    return value


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_work(run: Run, count: int):
    options = {"processes": count, "workers": 2, "layers": 8}
    clients = [run.start("join", **options) for _ in range(count - 1)]
    server = run.start("serve", **options)
    said = [run.end(process) for process in (server, *clients)]
    run.check_files(layers=8)
    assert sum(one["here"] for one in said) == 64
    assert sorted(said[0]["reported"]) == sorted(task.name for task in grid(8, 8)), "rank 0 is told of all tasks"
    for one in said[1:]:
        assert len(one["reported"]) == one["here"]
        assert one["shares"] == said[0]["shares"]
        assert one["text"] == said[0]["text"]
    assert said[0]["text"].startswith(f"[DTS] 64 tasks on {2 * count} workers in {count} processes: wall ")


def test_a_process_that_comes_late_takes_part(run: Run):
    server = run.start("serve", workers=1, seconds=0.1)
    _wait_for(lambda: run.started("layer 1 part *"))
    client = run.start("join", workers=2, seconds=0.1)
    said = [run.end(server), run.end(client)]
    run.check_files()
    assert said[1]["here"] > 0
    assert said[0]["here"] + said[1]["here"] == 40


def test_a_process_that_comes_when_all_is_done_is_told_so(run: Run):
    server = run.start("serve", processes=2, seconds=0.0, layers=1)
    _wait_for(lambda: len(run.started("layer 0 part *")) == 8)
    time.sleep(0.5)
    assert server.poll() is None
    client = run.start("join", processes=2, seconds=0.0, layers=1)
    assert run.end(client)["here"] == 0
    assert run.end(server)["here"] == 8


def test_the_task_of_a_killed_process_is_done_by_another(run: Run):
    server = run.start("serve", lease=1.0, workers=1, seconds=0.05)
    _wait_for(lambda: run.started("*"))
    client = run.start("join", workers=2, seconds=3600)
    (first, second) = _wait_for(lambda: (found := run.tasks_of(client)) and len(found) == 2 and found)
    assert server.poll() is None
    client.kill()
    said = run.end(server)
    run.check_files()
    assert {first, second} <= set(run.tasks_of(server))
    assert sorted(said["reported"]) == sorted(one.name for one in grid(5, 8)), "each task is reported once"


def test_a_process_that_only_seemed_dead_does_no_harm(run: Run):
    """Stopped for longer than its lease, then awake again: its late results are the same bytes."""
    client = run.start("join", workers=1, seconds=0.3, layers=2)
    server = run.start("serve", lease=1.0, workers=1, seconds=0.3, layers=2)
    (held,) = _wait_for(lambda: run.tasks_of(client))
    client.send_signal(signal.SIGSTOP)
    _wait_for(lambda: held in run.tasks_of(server))
    client.send_signal(signal.SIGCONT)
    said = [run.end(server), run.end(client)]
    run.check_files(layers=2)
    assert len(said[0]["reported"]) == len(set(said[0]["reported"])) == 16


def test_a_task_that_kills_its_workers_is_named(run: Run):
    options = {"layers": 1, "seconds": 5.0, "workers": 1}
    server = run.start("serve", lease=0.5, **options)
    _wait_for(lambda: server.pid in run.started("layer 0 part 7"))  # the longest: it keeps rank 0 alive
    clients = [run.start("join", kill="layer 0 part 6", **{**options, "seconds": 0.1}) for _ in range(3)]
    assert [client.wait(timeout=_PATIENCE_S) for client in clients] == [-signal.SIGKILL] * 3
    assert sorted(run.started("layer 0 part 6")) == sorted(client.pid for client in clients)
    said = run.end(server, code=2)
    assert said["error"] == "EngineError"
    assert said["text"].startswith("task 'layer 0 part 6' has lost its worker 3 times (")


def test_a_server_that_was_stopped_for_a_while_takes_no_task_away(run: Run):
    options = {"layers": 1, "width": 2, "seconds": 3.0, "workers": 1}
    server = run.start("serve", lease=1.0, **options)
    client = run.start("join", **options)
    _wait_for(lambda: len(run.started("layer 0 part *")) == 2)
    server.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    server.send_signal(signal.SIGCONT)
    assert [run.end(process)["here"] for process in (server, client)] == [1, 1]
    assert len(run.started("layer 0 part *")) == 2
    run.check_files(layers=1, width=2)


def test_a_process_with_other_tasks_is_refused_and_the_others_go_on(run: Run):
    server = run.start("serve", seconds=0.05)
    wrong = run.start("join", content="w4a8")
    said = run.end(wrong, code=2)
    assert said["error"] == "ConfigError"
    assert "semantic mismatch" in said["text"]
    assert "the first that differs is 'layer 0 part 0': here stage 0" in said["text"]
    assert run.tasks_of(wrong) == []
    assert run.end(server)["here"] == 40
    run.check_files()


def test_a_client_whose_server_is_killed_ends_with_one_error(run: Run):
    server = run.start("serve", seconds=0.2, workers=1)
    client = run.start("join", timeout=1.5, workers=2, seconds=0.2)
    _wait_for(lambda: run.tasks_of(client))
    server.kill()
    started = time.monotonic()
    said = run.end(client, code=2)
    assert time.monotonic() - started < 6
    assert said["error"] == "EngineError"
    assert said["text"].startswith(f"the task server at {run.address} has not answered for 1.5 s")


@pytest.mark.parametrize("role", ["serve", "join"])
def test_an_error_in_one_process_reaches_all(run: Run, role: str):
    """The long first task keeps the other process's only worker busy, so that the wrong one is left to this one."""
    other = "join" if role == "serve" else "serve"
    busy = run.start(other, layers=1, workers=1, seconds=3.0)
    if other == "serve":
        _wait_for(lambda: run.started("layer 0 part 7"))
    wrong = run.start(role, layers=1, workers=1, seconds=1.0, fail="layer 0 part 5")
    for process, where in ((wrong, ""), (busy, " (in process ")):
        said = run.end(process, code=2)
        assert said["error"] == "WeightsError"
        assert said["text"].startswith(f"task 'layer 0 part 5': tensor w is cut short{where}")
    assert run.started("layer 0 part 5") == [wrong.pid]
    assert not run.started("layer 0 part 4")


def test_ctrl_c_in_a_client_gives_its_tasks_to_the_others_at_once(run: Run):
    client = run.start("join", workers=2, seconds=0.1)
    server = run.start("serve", workers=1, seconds=0.1, lease=600)
    _wait_for(lambda: client.pid in run.started("layer 1 part *"))
    client.send_signal(signal.SIGINT)
    assert run.end(client, code=130)["error"] == "KeyboardInterrupt"
    assert run.end(server)["here"] < 40
    run.check_files()


def test_ctrl_c_in_the_server_ends_all(run: Run):
    client = run.start("join", workers=2, seconds=0.1)
    server = run.start("serve", workers=1, seconds=0.1)
    _wait_for(lambda: client.pid in run.started("layer 1 part *"))
    server.send_signal(signal.SIGINT)
    assert run.end(server, code=130)["error"] == "KeyboardInterrupt"
    said = run.end(client, code=2)
    assert said["error"] == "EngineError"
    assert said["text"].startswith("KeyboardInterrupt (in process ")
    assert not run.started("layer 4 part *")
