"""Runs tasks on the workers of this process, together with those of others, and says whether it was worth it."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from jaxmoe.errors import ConfigError, EngineError, JaxMoeError
from jaxmoe.log import logger
from jaxmoe.ptq.tasks.client import ClientSource
from jaxmoe.ptq.tasks.link import Link, error_of, failure_of
from jaxmoe.ptq.tasks.queue import Failed, TaskQueue, Totals, WorkerShare
from jaxmoe.ptq.tasks.server import ServerSource
from jaxmoe.ptq.tasks.source import Events, LocalSource, SharedQueue, Source
from jaxmoe.ptq.tasks.task import Task, check_graph

_LOOK_S = 0.5
_WORTH_IT = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did. tasks == sum of shares' tasks; exec_s + wait_s == sum of shares' present_s, or nearly."""

    tasks: int
    """Tasks of this run, by all processes."""
    tasks_here: int
    done_before: int
    """Tasks that an earlier run had finished."""
    wall_s: float
    exec_s: float
    """Time in tasks, over all workers. Where workers share cores it holds the waiting for a core too."""
    cpu_s: float
    """Time on cores, over all threads of all processes."""
    wait_s: float
    """Time of all workers without a task."""
    shares: tuple[WorkerShare, ...]
    shared_cores: bool
    """Whether the workers are made of the same cores, so that more of them do not mean more to work with."""

    @property
    def processes(self) -> int:
        """Processes that took part."""
        return len({share.worker.rpartition("/")[0] for share in self.shares})

    @property
    def speed_up(self) -> float:
        """Time of the work on one worker against the time it took."""
        return self.alone_s / self.wall_s if self.wall_s > 0 else 1.0

    @property
    def alone_s(self) -> float:
        """Time that one worker would take.

        Workers that share cores slow each other down, so that the time in tasks says too much: there it is no more
        than the time on cores, which is exact if a task alone keeps one core busy, and too much if it keeps several;
        nor less than the run took, part of which is waiting for disks or for other programs.
        """
        if not self.shared_cores or len(self.shares) == 1:
            return self.exec_s
        return min(self.exec_s, max(self.cpu_s, self.wall_s))

    @property
    def waiting(self) -> float:
        """Share of the workers' time without a task, 0 to 1."""
        whole = self.exec_s + self.wait_s
        return self.wait_s / whole if whole > 0 else 0.0

    def text(self) -> str:
        """One line for the log."""
        before = f" ({self.done_before} done before)" if self.done_before else ""
        cores = f" ({self.cpu_s:.1f} s on shared cores)" if self.shared_cores else ""
        line = (
            f"[DTS] {_count(self.tasks, 'task')}{before} on {_count(len(self.shares), 'worker')} in "
            f"{_count(self.processes, 'process')}: wall {self.wall_s:.1f} s, work {self.exec_s:.1f} s{cores}, "
            f"speed-up {self.speed_up:.1f}, waiting {100 * self.waiting:.0f} %"
        )
        if len(self.shares) > 1 and self.tasks and self.speed_up < _WORTH_IT:
            line += f"; not worth it: one worker would take {self.alone_s:.1f} s"
        return line


def run_tasks(
    tasks: Sequence[Task],
    execute: Callable[[Task, Any], None],
    workers: Sequence[Any],
    *,
    done: Iterable[str] = (),
    on_done: Callable[[Task, float], None] | None = None,
    link: Link | None = None,
    lease_s: float = 60.0,
    max_deaths: int = 3,
    shared_cores: bool = False,
) -> Summary:
    """Runs all tasks, each after those that write what it reads; returns when all are done, wherever they ran.

    An error in one task ends the run everywhere: no task is started any more, those that run are finished, and it is
    raised in every process. So does Ctrl-C in the process that has the queue; in another, only that one leaves. A
    second Ctrl-C does not wait for the running tasks.

    Args:
        tasks: all tasks, the same in every process; see `check_graph`; what none of them writes, none may read.
        execute: does a task on a worker; called in several threads; its result is durable when it returns. It may be
            called twice for one task, in two processes at a time, if a worker seemed dead.
        workers: one opaque value (a device) for each thread of this process.
        done: names of tasks that an earlier run has finished; only the queue's process looks at it.
        on_done: gets each finished task and its seconds, one call at a time in the calling thread: in the process that
            has the queue for the tasks of all processes, in the others for their own.
        link: where the other processes are; None: there are none.
        lease_s: a process that is not heard of for so long has died, and its tasks are given to others.
        max_deaths: so many workers may die of one task before the run fails.
        shared_cores: whether the workers are made of the same cores (several CPU devices of one host); for the summary.

    Raises:
        JaxMoeError: of a task, with its name; of the graph; or of the connection.
    """
    check_graph(tasks)
    if not workers:
        raise ConfigError(f"no workers for {len(tasks)} tasks; give at least one device")
    events: Events = SimpleQueue()
    source = _open_source(tasks, frozenset(done), events, link, lease_s, max_deaths)
    errors: list[BaseException] = []
    own = isinstance(source, ClientSource)
    threads = [
        threading.Thread(
            target=_work, args=(source, slot, execute, worker, events, errors, own), name=f"task-{slot}", daemon=True
        )
        for slot, worker in enumerate(workers)
    ]
    interrupt = _attend(threads, events, on_done, source)
    end = source.close()
    if not isinstance(interrupt, Exception):
        _report_done(events, on_done)
    if interrupt is not None:
        raise interrupt
    for text in sorted({str(error) for error in errors[1:]} - {str(error) for error in errors[:1]}):
        logger.error("[DTS] another error: %s", text)
    if errors:
        raise errors[0]
    if isinstance(end, Failed):
        raise error_of(end)
    if end is None:
        raise EngineError("the workers have stopped before the tasks were done")
    return summarize(end.totals, source.process, shared_cores=shared_cores)


def summarize(totals: Totals, process: str, *, shared_cores: bool = False) -> Summary:
    """The summary of a finished run, as one process tells it."""
    exec_s = sum((share.exec_s for share in totals.shares), 0.0)
    present_s = sum((share.present_s for share in totals.shares), 0.0)
    return Summary(
        tasks=sum(share.tasks for share in totals.shares),
        tasks_here=sum(share.tasks for share in totals.shares if share.worker.rpartition("/")[0] == process),
        done_before=totals.done_before,
        wall_s=totals.wall_s,
        exec_s=exec_s,
        cpu_s=totals.cpu_s,
        wait_s=max(0.0, present_s - exec_s),
        shares=totals.shares,
        shared_cores=shared_cores,
    )


def _open_source(
    tasks: Sequence[Task], done: frozenset[str], events: Events, link: Link | None, lease_s: float, max_deaths: int
) -> Source:
    if link is not None and not link.serve:
        return ClientSource(tasks, link)
    shared = SharedQueue(TaskQueue(tasks, done=done, lease_s=lease_s, max_deaths=max_deaths), events)
    return LocalSource(shared) if link is None else ServerSource(shared, tasks, link, lease_s)


def _work(
    source: Source,
    slot: int,
    execute: Callable[[Task, Any], None],
    worker: Any,
    events: Events,
    errors: list[BaseException],
    report: bool,
) -> None:
    """One worker thread: takes tasks until there are none. Whatever goes wrong is in `errors` before it ends."""
    cpu_before_s = time.process_time()
    try:
        channel = source.channel(slot)
        try:
            while isinstance(task := channel.take(), Task):
                started = time.perf_counter()
                try:
                    execute(task, worker)
                except BaseException as error:
                    named = named_error(task, error)
                    errors.append(named)
                    channel.failed(task, failure_of(named, source.process))
                    return
                seconds = time.perf_counter() - started
                channel.done(task, seconds, time.process_time() - cpu_before_s)
                if report:
                    events.put((task, seconds))
        finally:
            channel.close()
    except BaseException as error:  # the connection, or a fault of ours
        errors.append(error)
        source.abort(failure_of(error, source.process), everybody=True)
    finally:
        events.put(slot)


def named_error(task: Task, error: BaseException) -> JaxMoeError:
    """The error of a task with the task's name in front: the same object if it is one of ours, else one around it."""
    if isinstance(error, JaxMoeError):
        if task.name not in str(error):
            error.args = (f"task {task.name!r}: {error}",)
        return error
    named = EngineError(f"task {task.name!r}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def _attend(
    threads: list[threading.Thread], events: Events, on_done: Callable[[Task, float], None] | None, source: Source
) -> BaseException | None:
    """Starts the threads and reports finished tasks until all threads have ended; what interrupted it."""
    interrupt: BaseException | None = None
    to_start = threads[::-1]
    while to_start or any(thread.is_alive() for thread in threads):
        try:
            while to_start:
                to_start.pop().start()
            event = events.get(timeout=_LOOK_S)
            if isinstance(event, int):
                threads[event].join()
            elif on_done is not None and not isinstance(interrupt, Exception):
                on_done(*event)
        except Empty:
            continue
        except BaseException as error:
            if interrupt is not None:
                raise  # a second Ctrl-C
            interrupt = error
            to_start = []
            is_error = isinstance(error, Exception)
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            logger.warning("[DTS] %s; waiting for the tasks that run", text)
            source.abort(failure_of(EngineError(text), source.process), everybody=is_error)
    return interrupt


def _report_done(events: Events, on_done: Callable[[Task, float], None] | None) -> None:
    """Reports what finished in other processes after the threads of this one."""
    while not events.empty():
        event = events.get()
        if on_done is not None and not isinstance(event, int):
            on_done(*event)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
