"""The graph of tasks: what is refused, waves, and what tells two lists apart."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import EngineError
from jaxmoe.ptq.tasks.task import (
    Task,
    check_graph,
    describe,
    first_difference,
    predecessors,
    semantic_hash,
    summaries,
    waves,
)
from tests.ptq.tasks.graphs import graphs, task


def test_a_graph_with_all_inputs_declared_is_accepted():
    tasks = [task("load", reads=("checkpoint",), writes=("x",)), task("round", reads=("x",), writes=("y",))]
    check_graph(tasks, frozenset({"checkpoint"}))
    with pytest.raises(EngineError, match="task 'load' reads 'checkpoint', which no task writes"):
        check_graph(tasks)
    with pytest.raises(EngineError, match="task 'load' reads 'checkpoint', which no task writes"):
        waves(tasks)


_WRONG: dict[str, tuple[list[Task], str]] = {
    "name twice": ([task("a"), task("a")], "two tasks have the name 'a'"),
    "written twice": (
        [task("a", writes=("x",)), task("b", writes=("x",))],
        "tasks 'a' and 'b' both write 'x'; one task writes a resource",
    ),
    "nobody writes": ([task("a", reads=("x", "in"))], "task 'a' reads 'x', which no task writes"),
    "input written": ([task("a", writes=("in",))], "'in' is declared as an input, but task 'a' writes it"),
    "negative cost": ([task("a", cost=-1.0)], "task 'a' has cost -1.0"),
    "no cost": ([task("a", cost=float("nan"))], "task 'a' has cost nan"),
    "own result": ([task("a", reads=("x",), writes=("x",))], "in a circle: a -> a"),
    "circle": (
        [
            task("a", reads=("z",), writes=("x",)),
            task("b", reads=("x",), writes=("y",)),
            task("c", reads=("y",), writes=("z",)),
            task("behind", reads=("z",), writes=("w",)),
            task("before", writes=("v",)),
        ],
        "in a circle: ",
    ),
}


@pytest.mark.parametrize("case", _WRONG)
def test_a_wrong_graph_is_refused(case: str):
    tasks, message = _WRONG[case]
    with pytest.raises(EngineError) as error:
        check_graph(tasks, frozenset({"in"}))
    assert message in str(error.value)


def test_a_circle_is_named_in_the_order_of_the_data():
    with pytest.raises(EngineError) as error:
        waves(_WRONG["circle"][0])
    circle = str(error.value).rpartition(": ")[2].split(" -> ")
    assert circle in (["a", "b", "c", "a"], ["b", "c", "a", "b"], ["c", "a", "b", "c"])


@given(graphs())
def test_waves_hold_every_task_once_right_after_the_last_that_it_reads_from(tasks: list[Task]):
    levels = waves(tasks)
    level = {one.name: number for number, wave in enumerate(levels) for one in wave}
    assert sorted(level) == sorted(one.name for one in tasks)
    assert sum(map(len, levels)) == len(tasks)
    for name, before in predecessors(tasks).items():
        assert level[name] == max((level[earlier] + 1 for earlier in before), default=0)


@given(graphs(), st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_the_order_nor_on_the_cost(tasks: list[Task], chance: random.Random):
    other = [dataclasses.replace(one, cost=one.cost + 1) for one in tasks]
    chance.shuffle(other)
    assert semantic_hash(other) == semantic_hash(tasks)
    assert first_difference(summaries(other), summaries(tasks)) is None


@given(graphs(min_size=1), st.data())
def test_any_change_of_one_task_changes_the_hash_and_is_named(tasks: list[Task], data: st.DataObject):
    index = data.draw(st.integers(0, len(tasks) - 1))
    old = tasks[index]
    new = data.draw(
        st.sampled_from(
            [
                dataclasses.replace(old, content=old.content + "'"),
                dataclasses.replace(old, stage=old.stage + 1),
                dataclasses.replace(old, reads=old.reads | {"another"}),
                dataclasses.replace(old, writes=old.writes | {"another"}),
                dataclasses.replace(old, reads=old.writes, writes=old.reads | {"another"}),
            ]
        )
    )
    other = [*tasks[:index], new, *tasks[index + 1 :]]
    assert semantic_hash(other) != semantic_hash(tasks)
    assert first_difference(summaries(tasks), summaries(other)) == old.name
    assert describe(new) != describe(old)


def test_a_task_that_one_side_lacks_is_the_difference():
    here = summaries([task("a"), task("b"), task("d")])
    assert first_difference(here, summaries([task("a"), task("c"), task("d")])) == "b"
    assert first_difference(summaries([task("a")]), here) == "b"
    assert describe(None) == "no such task"


def test_the_hash_is_the_same_for_ever():
    """A process with another version of the code but the same meaning of tasks may take part."""
    assert semantic_hash([task("a", reads=("x",), writes=("y",), content="round")]) == (
        "8bb034aeda8079dfd885db1f645a6e8596a47d09c70fd074ee1d1689d814f426"
    )
