"""The queue for other processes: a thread of rank 0 that answers them."""

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from jaxmoe.errors import ConfigError, EngineError
from jaxmoe.log import logger
from jaxmoe.ptq.tasks.link import (
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Link,
    ProtocolError,
    bind_address,
    decode,
    encode,
    end_to_json,
    failure_of,
    field,
)
from jaxmoe.ptq.tasks.queue import Failed, Finished, Wait
from jaxmoe.ptq.tasks.source import LocalSource, SharedQueue
from jaxmoe.ptq.tasks.task import Task, describe, semantic_hash, summaries

_PARK_S = 1.0
"""A request for a task is kept for so long before the answer is 'wait': a free worker starts at once."""
_POLL_S = 0.1
_POLL_PARKED_S = 0.01
"""While somebody waits, this is how soon it is seen that a thread of this process has finished a task."""
_BEAT_S = 2.0
_SILENT_BEATS = 5
_TOLD_S = 1.0
"""A process that knows the end says good-bye well within this, unless a task keeps it."""


@dataclass(slots=True, kw_only=True)
class _Peer:
    """A process that has joined."""

    seen: float
    workers: set[str]
    told_at: float | None = None
    """When it was first told that the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parked:
    """A request for a task that waits for one."""

    route: bytes
    number: int
    process: str
    until: float


class ServerSource(LocalSource):
    """The queue of this process, for its own threads and for those of other processes."""

    def __init__(self, shared: SharedQueue, tasks: Sequence[Task], link: Link, lease_s: float):
        """Listens, and answers in a thread of its own.

        Args:
            shared: the queue.
            tasks: all tasks, to compare with those of the others.
            link: where to listen.
            lease_s: as the queue has it; tells the others how often to send a heart-beat.

        Raises:
            ConfigError: nothing can listen at this address.
        """
        super().__init__(shared)
        self._tasks = tuple(tasks)
        self._hash = semantic_hash(tasks)
        self._link = link
        self._lease_s = lease_s
        self._beat_s = min(_BEAT_S, lease_s / 4)
        self._run = secrets.token_hex(8)
        self._peers: dict[str, _Peer] = {}
        self._came: set[str] = set()
        self._parked: dict[str, _Parked] = {}
        self._ending: float | None = None
        self._said_missing = False
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.setsockopt(zmq.LINGER, 1000)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            address = bind_address(link.address)
            self._socket.bind(address)
        except BaseException as error:
            self._context.destroy(linger=0)
            if isinstance(error, zmq.ZMQError):
                raise ConfigError(
                    f"cannot listen at {link.address}: {error}; choose a free port of this host"
                ) from error
            raise
        self._thread = threading.Thread(target=self._serve, name="jaxmoe-tasks-server", daemon=True)
        self._thread.start()

    def close(self) -> Finished | Failed | None:
        """Waits until every process that is alive knows that the run is over, and stops listening."""
        self._closing.set()
        self._thread.join()
        return self.shared.end()

    def _serve(self) -> None:
        try:
            self._answer_all()
        except Exception as error:  # a fault here must not leave the workers waiting for ever
            logger.exception("the task server has failed")
            text = f"the task server has failed: {type(error).__name__}: {error}"
            self.shared.abort(failure_of(EngineError(text), self.process))
        finally:
            self._socket.close()
            self._context.term()

    def _answer_all(self) -> None:
        last = time.monotonic()
        while True:
            timeout_s = _POLL_PARKED_S if self._parked else _POLL_S
            if self._socket.poll(int(timeout_s * 1000)):
                self._drain()
            now = time.monotonic()
            if now - last > self._lease_s / 2:
                self.shared.renew_all()  # this process has slept: the heart-beats are still on their way
            else:
                for name, worker in self.shared.expire():
                    logger.warning("[DTS] worker %s is gone; its task %r goes to another", worker, name)
            last = now
            self._serve_parked(now)
            if self._closing.is_set() and self._may_leave(now):
                return

    def _drain(self) -> None:
        """Answers everything that has come, so that no lease ends whose heart-beat is already here."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"{len(frames) - 1} frames instead of one")
                message = decode(frames[1])
                number = field(message, "number", int)
                try:
                    self._handle(frames[0], number, message)
                except ProtocolError:
                    raise
                except EngineError as error:
                    self._send(frames[0], number, {"kind": "refused", "error": str(error)})
            except ProtocolError as error:
                logger.warning("[DTS] a message at %s is ignored: %s", self._link.address, error)

    def _handle(self, route: bytes, number: int, message: dict[str, Any]) -> None:
        kind, process = field(message, "kind", str), field(message, "process", str)
        if kind == "hello":
            self._hello(route, number, process, message)
            return
        if field(message, "run", str) != self._run:
            text = (
                f"the task server at {self._link.address} is of another run: rank 0 was started again; start this too"
            )
            self._send(route, number, {"kind": "refused", "error": text})
            return
        peer = self._peers.setdefault(process, _Peer(seen=0.0, workers=set()))
        peer.seen = time.monotonic()
        if kind == "take":
            self._take(route, number, process, field(message, "worker", str))
        elif kind == "done":
            seconds, cpu_s = field(message, "seconds", float), field(message, "cpu_s", float)
            self.shared.done(field(message, "worker", str), field(message, "task", str), seconds, cpu_s)
            self._send(route, number, {"kind": "ok"})
        elif kind == "failed":
            failure = Failed(error=field(message, "error", str), kind=field(message, "error_kind", str))
            self.shared.failed(field(message, "worker", str), field(message, "task", str), failure)
            self._send(route, number, {"kind": "ok"})
        elif kind == "abort":
            self.shared.abort(Failed(error=field(message, "error", str), kind=field(message, "error_kind", str)))
            self._send(route, number, {"kind": "ok"})
        elif kind == "beat":
            self.shared.renew(sorted(peer.workers))
            end = self.shared.end()
            if end is None:
                self._send(route, number, {"kind": "ok"})
            else:
                self._tell_end(route, number, peer, end)
        elif kind == "bye":
            self.shared.release(sorted(peer.workers))
            self._parked = {name: one for name, one in self._parked.items() if one.process != process}
            del self._peers[process]
            self._send(route, number, {"kind": "ok"})
        else:
            raise ProtocolError(f"unknown kind {kind!r}")

    def _hello(self, route: bytes, number: int, process: str, message: dict[str, Any]) -> None:
        """Compares version and tasks; a process with other tasks gets nothing but the difference."""
        version = field(message, "version", int)
        if version != PROTOCOL_VERSION:
            text = (
                f"the task server at {self._link.address} speaks version {PROTOCOL_VERSION} of the protocol and this "
                f"process version {version}; install the same jaxmoe everywhere"
            )
            logger.warning("[DTS] process %s is refused: %s", process, text)
            self._send(route, number, {"kind": "refused", "error": text})
            return
        theirs, count = field(message, "hash", str), field(message, "tasks", int)
        if theirs == self._hash:
            self._came.add(process)
            self._peers.setdefault(process, _Peer(seen=0.0, workers=set())).seen = time.monotonic()
            self._send(route, number, {"kind": "welcome", "run": self._run, "beat_s": self._beat_s})
        elif self.shared.over:
            pass  # it may be early for the next run, whose server will listen here when this one has left
        elif "differs" in message:
            name = field(message, "differs", str)
            mine = next((task for task in self._tasks if task.name == name), None)
            logger.warning(
                "[DTS] semantic mismatch: process %s has %d tasks and is refused; the first that differs is %r: here "
                "%s; there: %s", process, count, name, describe(mine), field(message, "description", str)
            )  # fmt: skip
            self._send(route, number, {"kind": "difference", "description": describe(mine)})
        else:
            answer = {"hash": self._hash, "tasks": len(self._tasks), "summaries": summaries(self._tasks)}
            self._send(route, number, {"kind": "mismatch", **answer})

    def _take(self, route: bytes, number: int, process: str, worker: str) -> None:
        self._peers[process].workers.add(worker)
        parked = _Parked(route=route, number=number, process=process, until=time.monotonic() + _PARK_S)
        if not self._offer(worker, parked):
            self._parked[worker] = parked
        else:
            self._parked.pop(worker, None)

    def _offer(self, worker: str, parked: _Parked) -> bool:
        """Answers with a task or the end, if there is one."""
        answer = self.shared.take_now(worker)
        if isinstance(answer, Wait):
            return False
        if isinstance(answer, Task):
            self._send(parked.route, parked.number, {"kind": "task", "task": answer.name})
        else:
            self._tell_end(parked.route, parked.number, self._peers[parked.process], answer)
        return True

    def _tell_end(self, route: bytes, number: int, peer: _Peer, end: Finished | Failed) -> None:
        if peer.told_at is None:
            peer.told_at = time.monotonic()
        self._send(route, number, end_to_json(end))

    def _serve_parked(self, now: float) -> None:
        for worker, parked in list(self._parked.items()):
            if self._offer(worker, parked):
                del self._parked[worker]
            elif parked.until <= now:
                del self._parked[worker]
                self._send(parked.route, parked.number, {"kind": "wait"})

    def _may_leave(self, now: float) -> bool:
        """Whether everybody knows the end and has left, or is finishing a task.

        Those who are silent have died; those who never came get `join_s`.
        """
        if self._ending is None:
            self._ending = now
        silent_s = max(1.0, _SILENT_BEATS * self._beat_s)
        for peer in self._peers.values():
            silent = now - peer.seen >= silent_s
            told = peer.told_at is not None and now - peer.told_at >= _TOLD_S
            if not silent and not told:
                return False
        if not isinstance(self.shared.end(), Finished):
            return True  # who comes now finds no server, which is as good as this error
        missing = (self._link.processes or 1) - 1 - len(self._came)
        if missing > 0 and not self._said_missing:
            logger.info("[DTS] all is done; waiting for processes that have not come yet: %d", missing)
            self._said_missing = True
        return missing <= 0 or now - self._ending >= self._link.join_s

    def _send(self, route: bytes, number: int, message: dict[str, Any]) -> None:
        # To a peer that is gone, or reads nothing, ROUTER drops the frame: the peer asks again if it lives.
        self._socket.send_multipart([route, encode({"number": number, **message})], zmq.NOBLOCK)
