"""Tasks for tests, one at a time or any graph without a circle, and an address for their queue."""

import socket
from collections.abc import Iterable

from hypothesis import strategies as st

from jaxmoe.ptq.tasks.task import Task


def task(
    name: str,
    *,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    cost: float = 1.0,
    stage: int = 0,
    content: str = "",
) -> Task:
    return Task(name=name, reads=frozenset(reads), writes=frozenset(writes), cost=cost, stage=stage, content=content)


@st.composite
def graphs(draw: st.DrawFn, min_size: int = 0, max_size: int = 8) -> list[Task]:
    """Each task reads what some earlier ones write; the list is in any order."""
    tasks = []
    for number in range(draw(st.integers(min_size, max_size))):
        earlier = draw(st.sets(st.integers(0, number - 1))) if number else set()
        tasks.append(
            task(
                f"t{number}",
                reads=[f"r{one}" for one in earlier],
                writes=[f"r{number}"],
                cost=draw(st.sampled_from([0.0, 1.0, 2.5])),
                stage=draw(st.integers(0, 2)),
                content=draw(st.sampled_from(["round", "rotate"])),
            )
        )
    return draw(st.permutations(tasks))


def free_address() -> str:
    """An address of this host where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
