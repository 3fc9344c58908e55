"""The wire within one process: who is let in, what strangers can do, and lost or repeated messages."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from jaxmoe.errors import ConfigError, EngineError, WeightsError
from jaxmoe.ptq.tasks import client as client_module
from jaxmoe.ptq.tasks.client import ClientSource
from jaxmoe.ptq.tasks.link import (
    Link,
    ProtocolError,
    bind_address,
    decode,
    end_from_json,
    end_to_json,
    error_of,
    failure_of,
    field,
)
from jaxmoe.ptq.tasks.queue import Failed, Finished, TaskQueue, Totals, Wait, WorkerShare
from jaxmoe.ptq.tasks.run import run_tasks
from jaxmoe.ptq.tasks.server import ServerSource
from jaxmoe.ptq.tasks.source import SharedQueue
from jaxmoe.ptq.tasks.task import Task, semantic_hash
from tests.ptq.tasks.graphs import free_address, task

_TASKS = [task("a", writes=("x",)), task("b", reads=("x",), writes=("y",)), task("c", reads=("y",))]


@contextmanager
def _server(
    tasks: list[Task], *, lease_s: float = 30.0, **options: Any
) -> Iterator[tuple[ServerSource, SharedQueue, Link]]:
    """A server, and the link for its clients."""
    address = free_address()
    shared = SharedQueue(TaskQueue(tasks, lease_s=lease_s), SimpleQueue())
    source = ServerSource(shared, tasks, Link(address=address, serve=True, **options), lease_s)
    try:
        yield source, shared, Link(address=address, serve=False, join_s=5.0, timeout_s=5.0)
    finally:
        source.close()


@contextmanager
def _stranger(link: Link) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(link.address)
        yield dealer


def _ask(dealer: zmq.Socket, **message: Any) -> dict[str, Any]:
    dealer.send(json.dumps(message).encode())
    assert dealer.poll(5000), f"no answer to {message}"
    return json.loads(dealer.recv())


def test_a_client_works_off_the_queue_of_the_server():
    with _server(_TASKS) as (_, shared, link):
        source = ClientSource(_TASKS, link)
        channel = source.channel(0)
        for name in "abc":
            taken = channel.take()
            assert taken == next(one for one in _TASKS if one.name == name)
            channel.done(taken, 0.5, 0.25)
        end = channel.take()
        channel.close()
        assert source.close() == end
        assert isinstance(end, Finished)
        assert [(share.worker, share.tasks, share.exec_s) for share in end.totals.shares] == [
            (f"{source.process}/0", 3, 1.5)
        ]
        assert shared.end() == end
        assert end.totals.cpu_s == 0.25


def test_other_tasks_are_refused_with_the_first_that_differs_on_both_sides(caplog: pytest.LogCaptureFixture):
    other = [_TASKS[0], task("b", reads=("x",), writes=("y",), content="w4a8"), task("extra")]
    with _server(_TASKS) as (_, shared, link):
        with pytest.raises(ConfigError) as error:
            ClientSource(other, link)
        text = str(error.value)
        assert text.startswith("semantic mismatch: this process has 3 tasks (")
        assert (
            "the first that differs is 'b': here stage 0, reads ['x'], writes ['y'], content 'w4a8'; "
            "there stage 0, reads ['x'], writes ['y'], content ''; start all processes with" in text
        )
        assert "semantic mismatch: process" in caplog.text
        assert "is refused; the first that differs is 'b': here stage 0" in caplog.text
        with pytest.raises(ConfigError, match="this process has 2 tasks .* is 'b': here no such task; there stage 0"):
            ClientSource([_TASKS[0], _TASKS[2]], link)
        assert shared.end() is None, "the run goes on without them"


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "PROTOCOL_VERSION", 2)
    with _server(_TASKS) as (_, _, link), pytest.raises(ConfigError) as error:
        ClientSource(_TASKS, link)
    assert "speaks version 1 of the protocol and this process version 2; install the same jaxmoe" in str(error.value)


def test_strangers_can_neither_stop_the_server_nor_finish_tasks(caplog: pytest.LogCaptureFixture):
    with _server(_TASKS) as (_, shared, link), _stranger(link) as dealer:
        for frame in (
            b"",
            b"\xff\xfe",
            b"[]",
            b"1e999",
            b'{"number": 1}',
            b'{"number": "1", "kind": "take"}',
            b"{" * 9,
        ):
            dealer.send(frame)
        dealer.send_multipart([b"two", b"frames"])
        dealer.send(json.dumps({"number": 1, "kind": "hello", "process": "p", "version": True}).encode())
        answer = _ask(dealer, number=7, kind="done", process="p", run="guess", worker="p/0", task="a", seconds=1.0)
        assert answer["number"] == 7
        assert answer["kind"] == "refused"
        assert "of another run" in answer["error"]
        assert shared.take_now("local/0") == _TASKS[0]
        assert caplog.text.count("is ignored") == 9
        ClientSource(_TASKS, link).close()


def test_a_stranger_that_floods_is_cut_off_and_the_others_are_served():
    with _server(_TASKS) as (_, _, link), _stranger(link) as dealer:
        dealer.send(b"x" * (2 << 20))
        ClientSource(_TASKS, link).close()


def test_a_task_that_there_is_not_is_answered_with_an_error():
    with _server(_TASKS) as (_, shared, link):
        source = ClientSource(_TASKS, link)
        channel = source.channel(0)
        with pytest.raises(EngineError, match="speaks of task 'z', which is none of the 3 tasks"):
            channel.done(task("z"), 1.0, 0.0)
        channel.close()
        source.close()
        assert shared.end() is None


def test_a_lost_answer_costs_nothing():
    """The same request again, as after a broken connection: the same task, and done counts once."""
    with _server(_TASKS) as (_, shared, link), _stranger(link) as one, _stranger(link) as two:
        hello = {"kind": "hello", "process": "p", "version": 1, "hash": semantic_hash(_TASKS), "tasks": 3}
        run = _ask(one, number=0, **hello)["run"]
        head = {"process": "p", "run": run, "worker": "p/0"}
        for number, dealer in enumerate((one, one, two), start=1):
            answer = _ask(dealer, number=number, kind="take", **head)
            assert answer == {"number": number, "kind": "task", "task": "a"}
        for dealer in (one, two):
            answer = _ask(dealer, number=9, kind="done", task="a", seconds=1.0, cpu_s=1, **head)
            assert answer == {"number": 9, "kind": "ok"}
        assert _ask(two, number=10, kind="take", **head)["task"] == "b"
        assert shared.take_now("local/0") == Wait()
        assert _ask(two, number=11, kind="bye", **head) == {"number": 11, "kind": "ok"}
        assert shared.take_now("local/0") == _TASKS[1]


def test_an_idle_client_gets_the_next_task_at_once_and_asks_again_while_there_is_none():
    with _server(_TASKS) as (_, shared, link):
        assert shared.take("local/0") == _TASKS[0]
        source = ClientSource(_TASKS, link)
        got: list[Any] = []

        def idle() -> None:
            channel = source.channel(0)
            got.append((channel.take(), time.monotonic()))
            channel.close()

        thread = threading.Thread(target=idle)
        thread.start()
        time.sleep(1.5)  # longer than the server keeps one request
        assert not got
        started = time.monotonic()
        shared.done("local/0", "a", 1.0, 0.0)
        thread.join(timeout=5)
        assert got[0][0] == _TASKS[1]
        assert got[0][1] - started < 0.5
        source.close()
        assert shared.take_now("local/0") == _TASKS[1], "a client that leaves gives its task back"


def test_heart_beats_keep_the_lease_of_a_long_task_and_a_good_bye_gives_it_away():
    with _server(_TASKS, lease_s=0.6) as (_, shared, link):
        source = ClientSource(_TASKS, link)
        channel = source.channel(0)
        assert channel.take() == _TASKS[0]
        time.sleep(1.5)
        assert shared.take_now("local/0") == Wait()
        channel.close()
        source.close()
        assert shared.take("local/0") == _TASKS[0]


def test_errors_keep_their_type_over_the_wire():
    failure = failure_of(WeightsError("task 'a': tensor w is cut short"), "n1-7-ab")
    sent = end_from_json(decode(json.dumps(end_to_json(failure)).encode()))
    assert sent == failure
    error = error_of(failure)
    assert type(error) is WeightsError
    assert str(error) == "task 'a': tensor w is cut short (in process n1-7-ab)"
    for kind in ("Nonsense", "__doc__", "JaxMoeError.x"):
        assert type(error_of(Failed(error="e", kind=kind))) is EngineError
    assert failure_of(ZeroDivisionError("x"), "p").kind == "EngineError"
    long = failure_of(WeightsError("w" * 1_000_000), "p").error
    assert len(long) < 11_000
    assert long.endswith(" ... (1000000 characters) (in process p)")


def test_the_end_survives_the_wire():
    share = WorkerShare(worker="p/0", tasks=3, exec_s=1.5, present_s=2.0)
    end = Finished(totals=Totals(done_before=2, wall_s=2.0, cpu_s=1.0, shares=(share, share)))
    assert end_from_json(decode(json.dumps(end_to_json(end)).encode())) == end


@pytest.mark.parametrize("value", [None, "1", 1.5, True, [1]])
def test_a_field_of_another_type_is_refused(value: Any):
    with pytest.raises(ProtocolError, match="field 'number' is .*, not of type int"):
        field({"number": value}, "number", int)
    assert field({"number": 1}, "number", float) == 1.0


def test_addresses():
    assert bind_address("tcp://*:5555") == "tcp://*:5555"
    assert bind_address("tcp://localhost:5555") == "tcp://127.0.0.1:5555"
    for address in ("localhost:5555", "tcp://localhost", "tcp://:5555", "tcp://localhost:x", "ipc://x:1"):
        with pytest.raises(ConfigError, match="it must be 'tcp://host:port'"):
            bind_address(address)
    with pytest.raises(ConfigError, match=r"use 'tcp://\*:5555' on it"):
        bind_address("tcp://no such host:5555")
    with pytest.raises(ConfigError, match="the address of the task queue is 'nonsense'"):
        ClientSource(_TASKS, Link(address="nonsense", serve=False, join_s=0.1))


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen at {address}: Address already in use .*; choose a"):
            run_tasks(_TASKS, lambda one, slot: None, [0], link=Link(address=address, serve=True))


def test_no_server_is_an_error_after_a_while():
    address = free_address()
    started = time.monotonic()
    with pytest.raises(EngineError, match=f"no task server answers at {address} within 0.5 s"):
        run_tasks(_TASKS, lambda one, slot: None, [0], link=Link(address=address, serve=False, join_s=0.5))
    assert time.monotonic() - started < 3


def test_several_runs_one_after_the_other_at_one_address():
    """A fast process that comes for the next run while the server of the last one is still there waits for its own."""
    address = free_address()
    done: list[str] = []
    lists = [[task(f"run {number} task {i}") for i in range(6)] for number in range(3)]

    def process(serve: bool) -> None:
        link = Link(address=address, serve=serve, processes=2, join_s=10.0)
        for tasks in lists:
            run_tasks(tasks, lambda one, slot: done.append(one.name), [0], link=link)

    threads = [threading.Thread(target=process, args=(serve,)) for serve in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert sorted(done) == sorted(one.name for tasks in lists for one in tasks)
