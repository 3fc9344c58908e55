"""The rules of the one queue: which task a worker gets, what a lease is, and when a run is over.

A state machine without threads, sockets or a clock: the time is an argument, in seconds from any origin. A worker is
'process/slot' and holds one task at a time. Invariant: a task that is not done is waiting for its reads, ready, or
leased to one worker.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmoe.errors import EngineError
from jaxmoe.ptq.tasks.task import Task, check_graph, followers, predecessors


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """What one worker did."""

    worker: str
    tasks: int
    """Tasks that it was the first to finish."""
    exec_s: float
    """Time in these tasks."""
    present_s: float
    """From its first request to the end of the run, or to the last that was heard of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all workers of all processes did."""

    done_before: int
    """Tasks that were done when the run began."""
    wall_s: float
    """From the first request to the last finished task."""
    cpu_s: float
    """Time on cores, over all threads of all processes."""
    shares: tuple[WorkerShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing is ready; ask again when a task is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All tasks are done."""

    totals: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run has failed; every worker gets this instead of a task."""

    error: str
    """A sentence that names the task."""
    kind: str
    """Class of the error: a name of jaxmoe/errors.py."""


@dataclass(slots=True, kw_only=True)
class _Lease:
    worker: str
    expires: float


@dataclass(slots=True, kw_only=True)
class _Worker:
    joined: float
    seen: float
    tasks: int = 0
    exec_s: float = 0.0
    holds: str | None = None
    gone: bool = False


class TaskQueue:
    """One queue for all workers of all processes."""

    def __init__(
        self, tasks: Sequence[Task], *, done: frozenset[str] = frozenset(), lease_s: float, max_deaths: int = 3
    ):
        """A fresh queue.

        Args:
            tasks: all tasks; see `check_graph`; what none of them writes, none may read.
            done: names of those finished in an earlier run.
            lease_s: a worker that is not heard of for so long has died.
            max_deaths: so many workers may die of one task before it is to blame.

        Raises:
            EngineError: the graph is wrong, or `done` names a task that there is not.
        """
        check_graph(tasks)
        assert lease_s > 0 and max_deaths > 0, (lease_s, max_deaths)
        self._tasks = {task.name: task for task in tasks}
        for name in sorted(done - self._tasks.keys()):
            raise EngineError(
                f"task {name!r} was finished in an earlier run, but is none of the {len(tasks)} tasks of this one; "
                "resume with the settings of that run, or start afresh"
            )
        self._lease_s = lease_s
        self._max_deaths = max_deaths
        self._done = set(done)
        self._done_before = len(done)
        before = predecessors(tasks)
        self._after = followers(before)
        self._missing = {name: set(names - done) for name, names in before.items()}
        self._ready: set[str] = set()
        self._heap: list[tuple[int, float, str]] = []
        self._leases: dict[str, _Lease] = {}
        self._workers: dict[str, _Worker] = {}
        self._deaths: dict[str, list[str]] = {}
        self._cpu_s: dict[str, float] = {}
        self._failure: Failed | None = None
        self._ended = 0.0
        for name in sorted(self._tasks):
            self._enqueue_if_ready(name)

    @property
    def failure(self) -> Failed | None:
        """Why the run has failed, if it has."""
        return self._failure

    @property
    def finished(self) -> bool:
        """Whether all tasks are done."""
        return len(self._done) == len(self._tasks)

    @property
    def over(self) -> bool:
        """Whether nobody gets a task any more."""
        return self.finished or self._failure is not None

    def task(self, name: str) -> Task | None:
        """The task of a name, if there is one."""
        return self._tasks.get(name)

    def take(self, worker: str, now: float, *, leased: bool = True) -> Task | Wait | Finished | Failed:
        """A task for a worker: lowest stage first, then the longest, then by name.

        A worker that holds a task gets the same one again: its request was sent twice, or the answer was lost.

        Args:
            worker: 'process/slot'.
            now: time.
            leased: False: a thread of this very process, which cannot die alone and sends no heart-beats.
        """
        state = self._see(worker, now)
        if self._failure is not None:
            return self._failure
        if self.finished:
            return Finished(totals=self.totals())
        expires = now + self._lease_s if leased else math.inf
        if state.holds is not None:
            self._leases[state.holds].expires = expires
            return self._tasks[state.holds]
        while self._heap:
            name = heapq.heappop(self._heap)[-1]
            if name in self._ready:  # otherwise done late by a worker whose lease had expired
                self._ready.remove(name)
                self._leases[name] = _Lease(worker=worker, expires=expires)
                state.holds = name
                return self._tasks[name]
        return Wait()

    def done(self, worker: str, name: str, seconds: float, now: float, *, cpu_s: float = 0.0) -> bool:
        """Takes note of a finished task; False: it was done already, by another worker or in an earlier request.

        It does not matter whether the worker still has the lease: a task's result is durable when it returns.

        Args:
            worker: 'process/slot'.
            name: of the task.
            seconds: that the task took.
            now: time.
            cpu_s: time on cores of all threads of the worker's process since it joined.

        Raises:
            EngineError: there is no such task.
        """
        self._check_name(worker, name)
        state = self._see(worker, now)
        process = worker.rpartition("/")[0]
        self._cpu_s[process] = max(cpu_s, self._cpu_s.get(process, 0.0))
        self._drop_lease_of(worker, name)
        if name in self._done:
            return False
        self._ready.discard(name)
        self._end_lease(name)  # of another worker, who was given it when this one seemed dead
        self._done.add(name)
        state.tasks += 1
        state.exec_s += seconds
        for follower in self._after[name]:
            self._missing[follower].discard(name)
            self._enqueue_if_ready(follower)
        if self.finished:
            self._ended = now
        return True

    def failed(self, worker: str, name: str, failure: Failed, now: float) -> bool:
        """A task has raised an error: the run fails; False: it had failed already, or the task was done by another.

        Raises:
            EngineError: there is no such task.
        """
        self._check_name(worker, name)
        self._see(worker, now)
        self._drop_lease_of(worker, name)
        if name in self._done:
            return False
        self._enqueue_if_ready(name)
        return self.abort(failure)

    def abort(self, failure: Failed) -> bool:
        """The run fails for a reason that is no task's; False: it was over already."""
        if self.over:
            return False
        self._failure = failure
        return True

    def renew(self, worker: str, now: float) -> None:
        """A heart-beat: the worker's lease starts anew."""
        state = self._see(worker, now)
        if state.holds is not None:
            lease = self._leases[state.holds]
            lease.expires = max(lease.expires, now + self._lease_s)

    def renew_all(self, now: float) -> None:
        """All leases start anew: for a server that has slept and could not hear the heart-beats."""
        for lease in self._leases.values():
            lease.expires = max(lease.expires, now + self._lease_s)

    def release(self, worker: str, now: float) -> None:
        """A worker leaves; what it holds is ready again."""
        state = self._see(worker, now)
        state.gone = True
        if state.holds is not None:
            name = state.holds
            self._end_lease(name)
            self._enqueue_if_ready(name)

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Takes the tasks of workers that were not heard of for too long, for others to have.

        Returns:
            (task, worker) of each lease that ended.
        """
        ended = sorted((name, lease.worker) for name, lease in self._leases.items() if lease.expires <= now)
        for name, worker in ended:
            self._workers[worker].gone = True
            self._end_lease(name)
            self._enqueue_if_ready(name)
            deaths = self._deaths.setdefault(name, [])
            deaths.append(worker)
            if len(deaths) >= self._max_deaths:
                self.abort(
                    Failed(
                        error=f"task {name!r} has lost its worker {len(deaths)} times ({', '.join(deaths)}), each time "
                        f"without a word for {self._lease_s:g} s; look there for a crash or for too little memory",
                        kind=EngineError.__name__,
                    )
                )
        return ended

    def totals(self) -> Totals:
        """What the workers did until the run was finished.

        Raises:
            EngineError: it is not finished.
        """
        if not self.finished:
            raise EngineError(f"{len(self._done)} of {len(self._tasks)} tasks are done; totals are for a finished run")
        started = min((state.joined for state in self._workers.values()), default=self._ended)
        shares = []
        for worker, state in sorted(self._workers.items()):
            left = min(state.seen, self._ended) if state.gone else self._ended
            shares.append(
                WorkerShare(
                    worker=worker, tasks=state.tasks, exec_s=state.exec_s, present_s=max(0.0, left - state.joined)
                )
            )
        return Totals(
            done_before=self._done_before,
            wall_s=max(0.0, self._ended - started),
            cpu_s=sum(self._cpu_s.values(), 0.0),
            shares=tuple(shares),
        )

    def _see(self, worker: str, now: float) -> _Worker:
        state = self._workers.get(worker)
        if state is None:
            state = self._workers[worker] = _Worker(joined=now, seen=now)
        state.seen = now
        state.gone = False
        return state

    def _check_name(self, worker: str, name: str) -> None:
        if name not in self._tasks:
            raise EngineError(f"worker {worker} speaks of task {name!r}, which is none of the {len(self._tasks)} tasks")

    def _enqueue_if_ready(self, name: str) -> None:
        if self._missing[name] or name in self._done or name in self._leases or name in self._ready:
            return
        task = self._tasks[name]
        self._ready.add(name)
        heapq.heappush(self._heap, (task.stage, -task.cost, name))

    def _drop_lease_of(self, worker: str, name: str) -> None:
        lease = self._leases.get(name)
        if lease is not None and lease.worker == worker:
            self._end_lease(name)

    def _end_lease(self, name: str) -> None:
        lease = self._leases.pop(name, None)
        if lease is not None:
            self._workers[lease.worker].holds = None
