"""Where a worker thread gets its tasks: the queue of this process, with its lock and clock, or one elsewhere."""

import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from jaxmoe.ptq.tasks.queue import Failed, Finished, TaskQueue, Wait
from jaxmoe.ptq.tasks.task import Task

Events = SimpleQueue[Any]
"""What has happened, for the thread that called `run_tasks`: (task, seconds) of each finished task, and more."""


class Channel(ABC):
    """One worker thread's way to the queue; used by that thread only."""

    @abstractmethod
    def take(self) -> Task | Finished | Failed:
        """The next task; waits while none is ready."""

    @abstractmethod
    def done(self, task: Task, seconds: float, cpu_s: float) -> None:
        """The task is finished and its result durable; `cpu_s`: of the whole process, since the run began for it."""

    @abstractmethod
    def failed(self, task: Task, failure: Failed) -> None:
        """The task has raised an error."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the channel holds."""


class Source(ABC):
    """The queue as a process sees it."""

    process: str
    """Names this process among all: 'host-pid-random'."""

    @abstractmethod
    def channel(self, slot: int) -> Channel:
        """The channel of one worker thread; called in that thread."""

    @abstractmethod
    def abort(self, failure: Failed, *, everybody: bool) -> None:
        """No more tasks for this process, or for `everybody`."""

    @abstractmethod
    def close(self) -> Finished | Failed | None:
        """Ends the connections when all worker threads have ended; how the run ended, None: it goes on elsewhere."""


def process_name() -> str:
    """A name that no other process has, on any host."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


class SharedQueue:
    """A `TaskQueue` for several threads of one process. Every method is safe in every thread."""

    def __init__(self, queue: TaskQueue, events: Events, clock: Callable[[], float] = time.monotonic):
        """Wraps a queue that nobody else uses.

        Args:
            queue: the rules.
            events: gets (task, seconds) of every task when it is done, whoever did it.
            clock: time in seconds that never goes back.
        """
        self._queue = queue
        self._events = events
        self._clock = clock
        self._changed = threading.Condition()

    @property
    def over(self) -> bool:
        """Whether nobody gets a task any more."""
        with self._changed:
            return self._queue.over

    def end(self) -> Finished | Failed | None:
        """How the run ended; None: it has not."""
        with self._changed:
            if self._queue.failure is not None:
                return self._queue.failure
            return Finished(totals=self._queue.totals()) if self._queue.finished else None

    def take_now(self, worker: str) -> Task | Wait | Finished | Failed:
        """What a worker of another process gets; it must send heart-beats."""
        with self._changed:
            return self._queue.take(worker, self._clock())

    def take(self, worker: str) -> Task | Finished | Failed:
        """What a thread of this process gets; waits while nothing is ready."""
        with self._changed:
            while True:
                answer = self._queue.take(worker, self._clock(), leased=False)
                if not isinstance(answer, Wait):
                    return answer
                self._changed.wait()

    def done(self, worker: str, name: str, seconds: float, cpu_s: float) -> None:
        """See `TaskQueue.done`."""
        with self._changed:
            if self._queue.done(worker, name, seconds, self._clock(), cpu_s=cpu_s):
                task = self._queue.task(name)
                self._events.put((task, seconds))
            self._changed.notify_all()

    def failed(self, worker: str, name: str, failure: Failed) -> None:
        """See `TaskQueue.failed`."""
        with self._changed:
            self._queue.failed(worker, name, failure, self._clock())
            self._changed.notify_all()

    def abort(self, failure: Failed) -> None:
        """See `TaskQueue.abort`."""
        with self._changed:
            self._queue.abort(failure)
            self._changed.notify_all()

    def renew(self, workers: list[str]) -> None:
        """A heart-beat of some workers."""
        with self._changed:
            for worker in workers:
                self._queue.renew(worker, self._clock())

    def renew_all(self) -> None:
        """See `TaskQueue.renew_all`."""
        with self._changed:
            self._queue.renew_all(self._clock())

    def release(self, workers: list[str]) -> None:
        """Some workers leave."""
        with self._changed:
            for worker in workers:
                self._queue.release(worker, self._clock())
            self._changed.notify_all()

    def expire(self) -> list[tuple[str, str]]:
        """See `TaskQueue.expire`."""
        with self._changed:
            ended = self._queue.expire(self._clock())
            if ended:
                self._changed.notify_all()
            return ended


class LocalChannel(Channel):
    """A thread of the process that has the queue."""

    def __init__(self, shared: SharedQueue, worker: str):
        """The channel of one worker."""
        self._shared = shared
        self._worker = worker

    def take(self) -> Task | Finished | Failed:
        """The next task."""
        return self._shared.take(self._worker)

    def done(self, task: Task, seconds: float, cpu_s: float) -> None:
        """The task is finished."""
        self._shared.done(self._worker, task.name, seconds, cpu_s)

    def failed(self, task: Task, failure: Failed) -> None:
        """The task has raised an error."""
        self._shared.failed(self._worker, task.name, failure)

    def close(self) -> None:
        """Nothing to free."""


class LocalSource(Source):
    """The queue of this process, and nobody else's."""

    def __init__(self, shared: SharedQueue):
        """A source on a queue."""
        self.process = process_name()
        self.shared = shared

    def channel(self, slot: int) -> Channel:
        """The channel of one thread."""
        return LocalChannel(self.shared, f"{self.process}/{slot}")

    def abort(self, failure: Failed, *, everybody: bool) -> None:
        """No more tasks for anybody: without this process there is no queue."""
        self.shared.abort(failure)

    def close(self) -> Finished | Failed | None:
        """How the run ended."""
        return self.shared.end()
