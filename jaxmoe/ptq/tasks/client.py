"""The queue of another process, as the threads of this one see it."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from jaxmoe.errors import ConfigError, EngineError
from jaxmoe.log import logger
from jaxmoe.ptq.tasks.link import PROTOCOL_VERSION, Link, ProtocolError, decode, encode, end_from_json, field
from jaxmoe.ptq.tasks.queue import Failed, Finished
from jaxmoe.ptq.tasks.source import Channel, Source, process_name
from jaxmoe.ptq.tasks.task import Task, describe, first_difference, semantic_hash, summaries

_AGAIN_S = 2.0
"""A request without an answer is sent again after so long."""
_SLICE_S = 0.1
_ABORT_S = 5.0
_BYE_S = 1.0
_END_S = 0.5
_DESCRIPTION_CHARACTERS = 1000


class _Caller:
    """One socket: a request, its answer, and patience. Used by one thread only."""

    def __init__(self, source: "ClientSource", context: zmq.Context):
        link = source.link
        self._source = source
        self._again_s = min(_AGAIN_S, link.timeout_s / 3)
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        # Not IMMEDIATE: with it, an answer that is here but not yet read is lost when the server closes.
        self._socket.setsockopt(zmq.LINGER, 0)  # all that matters is answered
        try:
            self._socket.connect(link.address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"the address of the task queue is {link.address!r} ({error}); it must be 'tcp://host:port'"
            ) from error

    def _tell(self, message: dict[str, Any]) -> bool:
        """Sends a message; False: there is no connection."""
        try:
            self._socket.send(encode({"number": self._number, **self._source.head, **message}), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The answer to a request; None: there was none in time, or another thread has given the server up."""
        self._number += 1
        now = time.monotonic()
        deadline, send_at = now + timeout_s, now
        while now < deadline and not self._source.given_up.is_set():
            if now >= send_at:
                send_at = now + (self._again_s if self._tell(message) else _SLICE_S)
            if self._socket.poll(int(1000 * min(_SLICE_S, deadline - now)) + 1):
                answer = decode(self._socket.recv())
                if field(answer, "number", int) == self._number:
                    field(answer, "kind", str)
                    return answer  # any other answers a request that was sent twice
            now = time.monotonic()
            if self._source.end is not None:  # the server may leave as soon as it has told this process
                deadline = min(deadline, now + _END_S)
        return None

    def close(self) -> None:
        self._socket.close()


class ClientSource(Source):
    """The queue of the process at `link.address`."""

    def __init__(self, tasks: Sequence[Task], link: Link):
        """Joins the run, whether it has begun or not, and starts the heart-beats.

        Raises:
            ConfigError: the server has other tasks or another version, or the address is none.
            EngineError: there is no server within `link.join_s`.
        """
        self.process = process_name()
        self.link = link
        self.tasks = {task.name: task for task in tasks}
        self.stopped: Failed | None = None
        self.end: Finished | Failed | None = None
        self.refusal: str | None = None
        self.given_up = threading.Event()
        self._quiet = threading.Event()
        self.head: dict[str, Any] = {"process": self.process}
        self._context = zmq.Context()
        try:
            beat_s = self._join(tasks)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._beats = threading.Thread(target=self._beat, args=(beat_s,), name="jaxmoe-tasks-beats", daemon=True)
        self._beats.start()

    def channel(self, slot: int) -> Channel:
        """The channel of one worker thread."""
        return _ClientChannel(self, self.caller(), f"{self.process}/{slot}")

    def abort(self, failure: Failed, *, everybody: bool) -> None:
        """No more tasks for this process, or for everybody."""
        self.stopped = failure
        if everybody and not self.given_up.is_set() and self.end is None:
            caller = self.caller()
            try:
                caller.call({"kind": "abort", "error": failure.error, "error_kind": failure.kind}, _ABORT_S)
            finally:
                caller.close()

    def close(self) -> Finished | Failed | None:
        """Says good-bye: what this process still holds goes to another at once."""
        self._quiet.set()
        self._beats.join()
        self._context.term()
        return self.end

    def caller(self) -> _Caller:
        """A socket for the calling thread."""
        return _Caller(self, self._context)

    def gone(self) -> EngineError:
        """The error for a server that does not answer."""
        if self.refusal is not None:
            return EngineError(self.refusal)
        return EngineError(
            f"the task server at {self.link.address} has not answered for {self.link.timeout_s:g} s: the process that "
            "has the queue has ended, or the network is down; finished tasks are kept, start all processes again"
        )

    def _join(self, tasks: Sequence[Task]) -> float:
        """Compares the tasks with the server's; how often it wants a heart-beat."""
        link = self.link
        hello = {
            "kind": "hello", "version": PROTOCOL_VERSION, "hash": semantic_hash(tasks), "tasks": len(tasks),
        }  # fmt: skip
        caller = self.caller()
        try:
            answer = caller.call(hello, link.join_s)
            if answer is None:
                raise EngineError(
                    f"no task server answers at {link.address} within {link.join_s:g} s; start the process that has "
                    "the queue (rank 0) there, and check the address"
                )
            if answer["kind"] == "mismatch":
                raise self._mismatch(caller, hello, answer)
            if answer["kind"] == "refused":
                raise ConfigError(field(answer, "error", str))
        finally:
            caller.close()
        self.head["run"] = field(answer, "run", str)
        return field(answer, "beat_s", float)

    def _mismatch(self, caller: _Caller, hello: dict[str, Any], answer: dict[str, Any]) -> ConfigError:
        """The first task that differs, with both sides; the server learns it too, for its log."""
        name = first_difference(summaries(self.tasks.values()), field(answer, "summaries", dict))
        assert name is not None, "two hashes of the same summaries"
        here = describe(self.tasks.get(name))[:_DESCRIPTION_CHARACTERS]
        reply = caller.call({**hello, "differs": name, "description": here}, self.link.timeout_s)
        there = "not told" if reply is None else field(reply, "description", str)[:_DESCRIPTION_CHARACTERS]
        return ConfigError(
            f"semantic mismatch: this process has {len(self.tasks)} tasks ({hello['hash'][:12]}), the task server at "
            f"{self.link.address} {field(answer, 'tasks', int)} ({field(answer, 'hash', str)[:12]}); the first that "
            f"differs is {name!r}: here {here}; there {there}; start all processes with the same model, recipe, data "
            "and version"
        )

    def _beat(self, beat_s: float) -> None:
        """Keeps the leases of this process, however long its tasks take, and notices when the server has gone."""
        caller = self.caller()
        try:
            while not self._quiet.wait(beat_s):
                answer = caller.call({"kind": "beat"}, self.link.timeout_s)
                if answer is None and self.end is not None:
                    return
                if answer is None or answer["kind"] == "refused":
                    self.refusal = None if answer is None else field(answer, "error", str)
                    self.given_up.set()
                    logger.warning("[DTS] %s; no more tasks are started here", self.gone())
                    return
                if answer["kind"] != "ok":
                    self.end = end_from_json(answer)
                    return
        except ProtocolError as error:
            self.refusal = f"the task server at {self.link.address} talks nonsense: {error}; what listens there?"
            self.given_up.set()
        finally:
            if not self.given_up.is_set():
                self._quiet.wait()
                caller.call({"kind": "bye"}, _BYE_S)
            caller.close()


class _ClientChannel(Channel):
    """One worker thread's socket."""

    def __init__(self, source: ClientSource, caller: _Caller, worker: str):
        self._source = source
        self._caller = caller
        self._worker = worker

    def take(self) -> Task | Finished | Failed:
        while True:
            if self._source.stopped is not None:
                return self._source.stopped
            answer = self._call({"kind": "take"})
            if answer is None:
                assert self._source.end is not None
                return self._source.end
            if answer["kind"] in ("finished", "failure"):
                self._source.end = end_from_json(answer)
                return self._source.end
            if answer["kind"] == "task" and self._source.stopped is None:
                return self._source.tasks[field(answer, "task", str)]

    def done(self, task: Task, seconds: float, cpu_s: float) -> None:
        self._call({"kind": "done", "task": task.name, "seconds": seconds, "cpu_s": cpu_s})

    def failed(self, task: Task, failure: Failed) -> None:
        self._call({"kind": "failed", "task": task.name, "error": failure.error, "error_kind": failure.kind})

    def close(self) -> None:
        self._caller.close()

    def _call(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None: the server has left, but had said before how the run ended.

        Raises:
            EngineError: the server is gone, or refuses.
        """
        answer = self._caller.call({"worker": self._worker, **message}, self._source.link.timeout_s)
        if answer is None:
            if self._source.end is None:
                self._source.given_up.set()
                raise self._source.gone()
            return None
        if answer["kind"] == "refused":
            raise EngineError(field(answer, "error", str))
        return answer
