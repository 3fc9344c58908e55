"""Tasks with declared reads and writes: the graph they make, its waves, and what tells two lists of them apart."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxmoe.errors import EngineError

_DIGEST_CHARACTERS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work that may run more than once with the same result, which is durable when it returns."""

    name: str
    reads: frozenset[str]
    """Resources that must be there before it starts."""
    writes: frozenset[str]
    """Resources that are there after it; no other task writes them."""
    cost: float
    """Predicted time in any unit, at least 0: among tasks that are ready in one stage the longest goes first."""
    stage: int
    """Of the tasks that are ready, those of the lowest stage go first."""
    content: str
    """What the task does, for the hash: all that its result depends on besides its reads."""


def check_graph(tasks: Sequence[Task], inputs: frozenset[str] = frozenset()) -> None:
    """Refuses tasks that cannot all run, or whose results would depend on their order.

    Args:
        tasks: all tasks.
        inputs: resources that are there from the start.

    Raises:
        EngineError: two tasks of one name, or one resource; a read that nobody writes; a cycle; a cost that is none.
    """
    names: set[str] = set()
    for task in tasks:
        if task.name in names:
            raise EngineError(f"two tasks have the name {task.name!r}; a name says which task is done")
        if not (math.isfinite(task.cost) and task.cost >= 0):
            raise EngineError(f"task {task.name!r} has cost {task.cost}; a cost is finite and at least 0")
        names.add(task.name)
    writers = _writers(tasks)
    for task in tasks:
        for resource in sorted(task.reads - writers.keys() - inputs):
            raise EngineError(
                f"task {task.name!r} reads {resource!r}, which no task writes; declare it as an input or add the "
                "task that writes it"
            )
    for resource in sorted(inputs & writers.keys()):
        raise EngineError(f"{resource!r} is declared as an input, but task {writers[resource]!r} writes it")
    done = {task.name for wave in _levels(tasks) for task in wave}
    if len(done) < len(names):
        raise EngineError(f"tasks wait for each other in a circle: {' -> '.join(_cycle(tasks, names - done))}")


def predecessors(tasks: Iterable[Task]) -> dict[str, frozenset[str]]:
    """Task name -> the tasks that write what it reads; reads that no task writes are inputs and count for nothing."""
    tasks = tuple(tasks)
    writers = _writers(tasks)
    return {task.name: frozenset(writers[read] for read in task.reads & writers.keys()) for task in tasks}


def followers(before: Mapping[str, frozenset[str]]) -> dict[str, tuple[str, ...]]:
    """The inverse of `predecessors`: task name -> the tasks that read what it writes, by name."""
    after: dict[str, list[str]] = {name: [] for name in before}
    for name in sorted(before):
        for earlier in before[name]:
            after[earlier].append(name)
    return {name: tuple(names) for name, names in after.items()}


def waves(tasks: Sequence[Task]) -> tuple[tuple[Task, ...], ...]:
    """The levels of the graph: a task is in the first wave after all that it reads from; in a wave by name.

    Raises:
        EngineError: see `check_graph`.
    """
    check_graph(tasks)
    return _levels(tasks)


def summaries(tasks: Iterable[Task]) -> dict[str, str]:
    """Task name -> a digest of what the task is: small enough to send when two lists differ.

    The cost is left out: it is a prediction, which may depend on the machine, and changes no result.
    """
    return {task.name: _digest([task.name, *_meaning(task)])[:_DIGEST_CHARACTERS] for task in tasks}


def semantic_hash(tasks: Iterable[Task]) -> str:
    """sha256 (64 hexadecimal characters) of what all tasks are, in whatever order they come."""
    return _digest(sorted(summaries(tasks).items()))


def first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """The first name, in order, that only one of two `summaries` has or that has two digests; None: no difference."""
    return next((name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)), None)


def describe(task: Task | None) -> str:
    """One line for the message that two lists differ."""
    if task is None:
        return "no such task"
    reads, writes, stage, content = _meaning(task)
    return f"stage {stage}, reads {reads}, writes {writes}, content {content!r}"


def _meaning(task: Task) -> tuple[list[str], list[str], int, str]:
    return sorted(task.reads), sorted(task.writes), task.stage, task.content


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def _writers(tasks: Iterable[Task]) -> dict[str, str]:
    """Resource -> the one task that writes it."""
    writers: dict[str, str] = {}
    for task in tasks:
        for resource in sorted(task.writes):
            if resource in writers:
                raise EngineError(
                    f"tasks {writers[resource]!r} and {task.name!r} both write {resource!r}; one task writes a resource"
                )
            writers[resource] = task.name
    return writers


def _levels(tasks: Iterable[Task]) -> tuple[tuple[Task, ...], ...]:
    """Waves of all tasks that are not in a cycle, nor behind one."""
    by_name = {task.name: task for task in tasks}
    before = predecessors(by_name.values())
    missing = {name: len(names) for name, names in before.items()}
    after = followers(before)
    levels: list[tuple[Task, ...]] = []
    level = sorted(name for name, count in missing.items() if not count)
    while level:
        levels.append(tuple(by_name[name] for name in level))
        freed: list[str] = []
        for name in level:
            for follower in after[name]:
                missing[follower] -= 1
                if not missing[follower]:
                    freed.append(follower)
        level = sorted(freed)
    return tuple(levels)


def _cycle(tasks: Iterable[Task], stuck: set[str]) -> list[str]:
    """A circle among the tasks that can never start, each one before the next; the first is named again at the end."""
    before = predecessors(tasks)
    path = [min(stuck)]
    while path.count(path[-1]) == 1:
        path.append(min(before[path[-1]] & stuck))
    return path[path.index(path[-1]) :][::-1]
