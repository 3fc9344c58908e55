"""Threads of one process: order, errors, Ctrl-C, and the summary."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.errors import ConfigError, EngineError, UnsupportedError, WeightsError
from jaxmoe.ptq.tasks.queue import WorkerShare
from jaxmoe.ptq.tasks.run import Summary, run_tasks
from jaxmoe.ptq.tasks.task import Task, predecessors
from tests.ptq.tasks.graphs import graphs, task

_ROOT = Path(__file__).resolve().parents[3]


@settings(max_examples=15)
@given(tasks=graphs(), workers=st.integers(1, 4), data=st.data())
def test_each_task_runs_once_after_all_that_it_reads(tasks: list[Task], workers: int, data: st.DataObject):
    before = predecessors(tasks)
    names = sorted(before)
    earlier = frozenset(data.draw(st.sets(st.sampled_from(names)))) if names else frozenset()
    finished, slots, reported = set(earlier), set(), []
    lock = threading.Lock()

    def execute(one: Task, slot: str) -> None:
        with lock:
            assert before[one.name] <= finished
            assert slot not in slots, "a worker has two tasks"
            slots.add(slot)
        time.sleep(0.0005)
        with lock:
            slots.remove(slot)
            finished.add(one.name)

    def on_done(one: Task, seconds: float) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert seconds > 0
        reported.append(one.name)

    summary = run_tasks(tasks, execute, [f"device {i}" for i in range(workers)], done=earlier, on_done=on_done)
    assert finished == set(names)
    assert sorted(reported) == sorted(set(names) - earlier)
    assert summary.tasks == summary.tasks_here == len(reported)
    assert summary.done_before == len(earlier)
    assert len(summary.shares) == workers
    assert summary.processes == 1


def test_independent_tasks_overlap_and_the_summary_says_so():
    barrier = threading.Barrier(4, timeout=10)

    def execute(one: Task, slot: int) -> None:
        barrier.wait()  # passes only if four tasks run at the same time
        time.sleep(0.05)

    summary = run_tasks([task(f"t{i}") for i in range(8)], execute, range(4))
    assert [share.tasks for share in summary.shares] == [2, 2, 2, 2]
    assert summary.speed_up > 2
    assert summary.waiting < 0.5
    assert "not worth it" not in summary.text()


def test_a_chain_gains_nothing_and_the_summary_says_so():
    def execute(one: Task, slot: int) -> None:
        time.sleep(0.01)

    tasks = [task(f"t{i}", reads=[f"r{i - 1}"] if i else [], writes=[f"r{i}"]) for i in range(5)]
    summary = run_tasks(tasks, execute, range(2))
    assert summary.speed_up <= 1.0
    assert summary.waiting > 0.3
    assert summary.text().endswith(f"; not worth it: one worker would take {summary.exec_s:.1f} s")
    assert "not worth it" not in run_tasks(tasks, execute, [0]).text()


def test_workers_that_share_cores_are_not_said_to_gain_from_waiting_for_each_other():
    """Four threads that compute under one lock: the time in tasks is four times the work."""
    lock = threading.Lock()

    def execute(one: Task, slot: int) -> None:
        with lock:
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass

    tasks = [task(f"t{i}") for i in range(8)]
    assert run_tasks(tasks, execute, range(4)).speed_up > 2
    honest = run_tasks(tasks, execute, range(4), shared_cores=True)
    assert honest.exec_s / honest.wall_s > 2
    assert honest.speed_up < 1.1
    assert "s on shared cores), speed-up" in honest.text()
    assert "not worth it" in honest.text()


def _summary(**changes: Any) -> Summary:
    shares = tuple(
        WorkerShare(worker=f"{host}-1-ab/{slot}", tasks=103, exec_s=100.525, present_s=117.0)
        for host in ("n1", "n2")
        for slot in range(2)
    )
    values: dict[str, Any] = {
        "tasks": 412, "tasks_here": 206, "done_before": 0, "wall_s": 61.0, "exec_s": 402.1, "cpu_s": 90.0,
        "wait_s": 65.9, "shares": shares, "shared_cores": False,
    }  # fmt: skip
    return Summary(**{**values, **changes})


def test_the_line():
    assert _summary().text() == (
        "[DTS] 412 tasks on 4 workers in 2 processes: wall 61.0 s, work 402.1 s, speed-up 6.6, waiting 14 %"
    )
    assert _summary(shared_cores=True, done_before=3).text() == (
        "[DTS] 412 tasks (3 done before) on 4 workers in 2 processes: wall 61.0 s, work 402.1 s (90.0 s on shared "
        "cores), speed-up 1.5, waiting 14 %"
    )
    alone = _summary(shares=_summary().shares[:1], tasks=1, exec_s=60.0, wait_s=0.0)
    assert alone.text() == "[DTS] 1 task on 1 worker in 1 process: wall 61.0 s, work 60.0 s, speed-up 1.0, waiting 0 %"


def test_nothing_to_do():
    def execute(one: Task, slot: int) -> None:
        raise AssertionError

    for tasks in ([], [task("a")]):
        summary = run_tasks(tasks, execute, range(2), done=[one.name for one in tasks])
        assert (summary.tasks, summary.wall_s, summary.speed_up, summary.waiting) == (0, 0.0, 1.0, 0.0)
        assert summary.done_before == len(tasks)
    with pytest.raises(ConfigError, match="no workers for 1 tasks; give at least one device"):
        run_tasks([task("a")], execute, [])


def test_an_error_ends_the_run_after_the_tasks_that_run():
    entered, finished, reported = threading.Barrier(2, timeout=10), [], []

    def execute(one: Task, slot: int) -> None:
        if one.name == "bad":
            entered.wait()
            raise WeightsError("tensor w is cut short")
        entered.wait()
        time.sleep(0.1)
        finished.append(one.name)

    tasks = [task("bad", cost=9.0), task("good", cost=8.0), task("never", cost=1.0)]
    with pytest.raises(WeightsError) as error:
        run_tasks(tasks, execute, range(2), on_done=lambda one, seconds: reported.append(one.name))
    assert str(error.value) == "task 'bad': tensor w is cut short"
    assert finished == reported == ["good"]


def test_an_error_that_names_the_task_stays_as_it_is():
    class OwnError(UnsupportedError):
        def __init__(self, first: str, second: int):
            super().__init__(f"{first} {second}")

    def execute(one: Task, slot: int) -> None:
        raise OwnError("no scheme for layer", 3)

    with pytest.raises(OwnError) as error:
        run_tasks([task("layer 3")], execute, [0])
    assert str(error.value) == "no scheme for layer 3"
    with pytest.raises(OwnError) as error:
        run_tasks([task("layer 4")], execute, [0])
    assert str(error.value) == "task 'layer 4': no scheme for layer 3"


def test_any_other_error_is_told_with_the_task_and_its_cause():
    def execute(one: Task, slot: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError) as error:
        run_tasks([task("write")], execute, [0])
    assert str(error.value) == "task 'write': OSError: [Errno 28] No space left on device"
    assert isinstance(error.value.__cause__, OSError)


def test_all_errors_of_a_run_are_told(caplog: pytest.LogCaptureFixture):
    both = threading.Barrier(2, timeout=10)

    def execute(one: Task, slot: int) -> None:
        both.wait()
        raise WeightsError(f"{one.name} is broken")

    with pytest.raises(WeightsError) as error:
        run_tasks([task("a"), task("b")], execute, range(2))
    other = {"a is broken": "b is broken", "b is broken": "a is broken"}[str(error.value)]
    assert f"[DTS] another error: {other}" in caplog.text


def test_an_error_of_the_report_ends_the_run():
    started = []

    def execute(one: Task, slot: int) -> None:
        started.append(one.name)
        time.sleep(0.02)

    def on_done(one: Task, seconds: float) -> None:
        raise OSError("the journal is full")

    tasks = [task(f"t{i}") for i in range(50)]
    with pytest.raises(OSError, match="the journal is full"):
        run_tasks(tasks, execute, [0], on_done=on_done)
    assert len(started) < 10


def test_ctrl_c_waits_for_the_tasks_that_run_and_reports_them(tmp_path: Path):
    """In a process of its own, where the signal reaches nothing else."""
    code = """
import os, signal, sys, time
from pathlib import Path
from jaxmoe.ptq.tasks.run import run_tasks
from jaxmoe.ptq.tasks.task import Task

def execute(task, slot):
    if task.name == "t1":  # t0 runs for a while yet
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    (Path(sys.argv[1]) / task.name).touch()

tasks = [
    Task(name=f"t{i}", reads=frozenset(), writes=frozenset(), cost=1.0, stage=i, content="") for i in range(9)
]
reported = []
try:
    run_tasks(tasks, execute, range(2), on_done=lambda task, seconds: reported.append(task.name))
except KeyboardInterrupt:
    print(*sorted(reported))
    sys.exit(7)
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        cwd=_ROOT, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert run.returncode == 7, run.stderr
    assert run.stdout.split() == sorted(os.listdir(tmp_path)) == ["t0", "t1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
