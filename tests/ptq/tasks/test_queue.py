"""The rules of the queue, one by one and as a state machine in which workers die at any moment."""

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxmoe.errors import EngineError
from jaxmoe.ptq.tasks.queue import Failed, Finished, TaskQueue, Totals, Wait, WorkerShare
from jaxmoe.ptq.tasks.task import Task, predecessors
from tests.ptq.tasks.graphs import graphs, task

_FAILURE = Failed(error="task 'a': no memory", kind="EngineError")
_A, _B = "one/0", "two/0"


def _taken(queue: TaskQueue, worker: str, now: float = 0.0) -> str:
    answer = queue.take(worker, now)
    assert isinstance(answer, Task), answer
    return answer.name


def test_the_lowest_stage_goes_first_then_the_longest_then_the_name():
    tasks = [
        task("late", stage=1, cost=9.0),
        task("short", cost=1.0),
        task("long", cost=3.0),
        task("c", cost=2.0),
        task("b", cost=2.0),
    ]
    queue = TaskQueue(tasks, lease_s=10.0)
    assert [_taken(queue, f"p/{slot}") for slot in range(5)] == ["long", "b", "c", "short", "late"]
    assert queue.take("p/5", 0.0) == Wait()


def test_a_task_waits_for_all_that_it_reads():
    tasks = [task("a", writes=("x",)), task("b", writes=("y",)), task("c", reads=("x", "y"), stage=-1)]
    queue = TaskQueue(tasks, lease_s=10.0)
    assert (_taken(queue, _A), _taken(queue, _B)) == ("a", "b")
    assert queue.done(_A, "a", 1.0, 1.0)
    assert queue.take(_A, 1.0) == Wait()
    assert queue.done(_B, "b", 2.0, 2.0)
    assert _taken(queue, _A, 2.0) == "c"
    assert queue.take(_B, 2.0) == Wait()
    assert queue.done(_A, "c", 3.0, 5.0)
    totals = Totals(
        done_before=0,
        wall_s=5.0,
        cpu_s=0.0,
        shares=(
            WorkerShare(worker=_A, tasks=2, exec_s=4.0, present_s=5.0),
            WorkerShare(worker=_B, tasks=1, exec_s=2.0, present_s=5.0),
        ),
    )
    assert queue.take(_A, 5.0) == queue.take(_B, 6.0) == Finished(totals=totals)


def test_a_request_that_is_sent_twice_gets_the_same_task():
    queue = TaskQueue([task("a"), task("b")], lease_s=10.0)
    assert _taken(queue, _A) == _taken(queue, _A) == "a"
    assert queue.done(_A, "a", 1.0, 1.0)
    assert not queue.done(_A, "a", 1.0, 1.0)
    assert _taken(queue, _B) == "b"


def test_what_was_done_in_an_earlier_run_is_not_done_again():
    tasks = [task("a", writes=("x",)), task("b", reads=("x",), writes=("y",)), task("c", reads=("y",))]
    queue = TaskQueue(tasks, done=frozenset({"a", "b"}), lease_s=10.0)
    assert _taken(queue, _A) == "c"
    assert TaskQueue(tasks, done=frozenset("abc"), lease_s=10.0).finished
    with pytest.raises(EngineError, match="task 'd' was finished in an earlier run, but is none of the 3 tasks"):
        TaskQueue(tasks, done=frozenset("d"), lease_s=10.0)


def test_a_task_of_a_silent_worker_goes_to_another_and_the_late_result_counts_once():
    queue = TaskQueue([task("a", writes=("x",)), task("b", reads=("x",))], lease_s=10.0)
    assert _taken(queue, _A, 0.0) == "a"
    queue.renew(_A, 9.0)
    assert queue.expire(18.9) == []
    assert queue.take(_B, 18.9) == Wait()
    assert queue.expire(19.0) == [("a", _A)]
    assert _taken(queue, _B, 19.0) == "a"
    assert queue.done(_A, "a", 19.5, 19.5), "it was not dead: its result is as good as the other's"
    assert queue.expire(29.5) == [], "the other's lease ended with the task"
    assert _taken(queue, _A, 29.5) == "b"
    assert not queue.done(_B, "a", 1.0, 30.0)
    assert queue.take(_B, 30.0) == Wait()
    assert queue.done(_A, "b", 1.0, 31.0)
    assert [share.tasks for share in queue.totals().shares] == [2, 0]


def test_a_late_result_before_anybody_else_took_the_task():
    queue = TaskQueue([task("a"), task("b")], lease_s=10.0)
    assert _taken(queue, _A) == "a"
    assert queue.expire(10.0) == [("a", _A)]
    assert queue.done(_A, "a", 11.0, 11.0)
    assert _taken(queue, _B, 11.0) == "b"


def test_threads_of_the_same_process_need_no_heart_beats():
    queue = TaskQueue([task("a")], lease_s=10.0)
    assert isinstance(queue.take(_A, 0.0, leased=False), Task)
    queue.renew(_A, 1.0)
    queue.renew_all(1.0)
    assert queue.expire(1e9) == []


def test_a_server_that_slept_takes_no_lease_away():
    queue = TaskQueue([task("a")], lease_s=10.0)
    _taken(queue, _A)
    queue.renew_all(100.0)
    assert queue.expire(109.0) == []
    assert queue.expire(110.0) == [("a", _A)]


def test_a_task_that_kills_three_workers_is_to_blame():
    queue = TaskQueue([task("huge"), task("b", cost=0.5)], lease_s=10.0)
    for number in range(3):
        assert queue.failure is None
        assert _taken(queue, f"p{number}/0", 20.0 * number) == "huge"
        assert queue.expire(20.0 * number + 10.0) == [("huge", f"p{number}/0")]
    answer = queue.take(_A, 100.0)
    assert isinstance(answer, Failed)
    assert answer.error.startswith("task 'huge' has lost its worker 3 times (p0/0, p1/0, p2/0)")


def test_a_worker_that_leaves_gives_its_task_back_without_blame():
    queue = TaskQueue([task("a")], lease_s=10.0, max_deaths=1)
    for worker in (_A, _B, _A):
        assert _taken(queue, worker) == "a"
        queue.release(worker, 1.0)
    assert queue.failure is None


def test_after_an_error_nobody_gets_a_task_but_results_are_noted():
    tasks = [task("a"), task("b"), task("c")]
    queue = TaskQueue(tasks, lease_s=10.0)
    _taken(queue, _A), _taken(queue, _B)
    assert queue.failed(_A, "a", _FAILURE, 1.0)
    assert not queue.failed(_B, "b", Failed(error="another", kind="EngineError"), 1.0)
    assert queue.take(_A, 2.0) == queue.take("three/0", 2.0) == _FAILURE
    assert queue.done(_B, "b", 2.0, 2.0)
    assert queue.take(_B, 2.0) == _FAILURE
    with pytest.raises(EngineError, match="1 of 3 tasks are done"):
        queue.totals()


def test_a_late_error_of_a_task_that_another_has_done_is_harmless():
    queue = TaskQueue([task("a"), task("b")], lease_s=10.0)
    _taken(queue, _A)
    queue.expire(10.0)
    assert _taken(queue, _B, 10.0) == "a"
    assert queue.done(_B, "a", 1.0, 11.0)
    assert not queue.failed(_A, "a", _FAILURE, 12.0)
    assert queue.failure is None
    assert queue.done(_B, "b", 1.0, 13.0)
    assert not queue.abort(_FAILURE), "it is too late to fail"


def test_a_task_that_is_none_is_an_error():
    queue = TaskQueue([task("a")], lease_s=10.0)
    for call in (lambda: queue.done(_A, "z", 1.0, 1.0), lambda: queue.failed(_A, "z", _FAILURE, 1.0)):
        with pytest.raises(EngineError, match="worker one/0 speaks of task 'z', which is none of the 1 tasks"):
            call()


class QueueMachine(RuleBasedStateMachine):
    """Workers that take, finish, fail to say so, die, wake up again and leave, beside a model of sets."""

    @initialize(tasks=graphs(min_size=1), data=st.data())
    def start(self, tasks: list[Task], data: st.DataObject) -> None:
        names = sorted(one.name for one in tasks)
        earlier = data.draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
        self.now = 0.0
        self.queue = TaskQueue(tasks, done=frozenset(earlier), lease_s=10.0, max_deaths=1000)
        self.before = predecessors(tasks)
        self.tasks = {one.name: one for one in tasks}
        self.done: set[str] = set(earlier)
        self.counted = 0
        self.holds: dict[str, str] = {}
        """Worker -> task, as the queue must believe."""
        self.working: dict[str, str] = {}
        """Worker -> task, as it is: a worker whose lease has ended may be alive and still at it."""

    def ready(self) -> set[str]:
        return {
            name
            for name, before in self.before.items()
            if name not in self.done and before <= self.done and name not in self.holds.values()
        }

    workers = st.sampled_from(["p/0", "p/1", "q/0"])

    @rule(worker=workers)
    def take(self, worker: str) -> None:
        if worker in self.working and worker not in self.holds:
            return  # it is busy with a task whose lease has ended, so it asks for nothing
        answer = self.queue.take(worker, self.now)
        if worker in self.holds:
            assert isinstance(answer, Task) and answer.name == self.holds[worker]
        elif len(self.done) == len(self.tasks):
            assert isinstance(answer, Finished)
        elif not self.ready():
            assert answer == Wait()
        else:
            best = min((self.tasks[name].stage, -self.tasks[name].cost, name) for name in self.ready())
            assert answer == self.tasks[best[-1]]
            self.holds[worker] = self.working[worker] = best[-1]

    @precondition(lambda self: self.working)
    @rule(data=st.data(), twice=st.booleans())
    def finish(self, data: st.DataObject, twice: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.working)))
        name = self.working.pop(worker)
        assert self.queue.done(worker, name, 1.0, self.now) == (name not in self.done)
        self.counted += name not in self.done
        self.done.add(name)
        self.holds = {one: held for one, held in self.holds.items() if held != name}
        if twice:
            assert not self.queue.done(worker, name, 1.0, self.now)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Its work is lost; the queue does not know yet. The next worker of that name is a new one, after expiry."""
        worker = data.draw(st.sampled_from(sorted(self.working)))
        del self.working[worker]

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]), alive=st.booleans())
    def time_passes(self, seconds: float, alive: bool) -> None:
        self.now += seconds
        if alive:
            for worker in self.working:
                self.queue.renew(worker, self.now)
        for name, worker in self.queue.expire(self.now):
            assert self.holds.pop(worker) == name
            assert not (alive and worker in self.working), "a worker that sends heart-beats keeps its task"

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        self.queue.release(worker, self.now)
        self.holds.pop(worker, None)
        self.working.pop(worker, None)

    @invariant()
    def everything_gets_done(self) -> None:
        """From any state, one live worker can finish all that is left: nothing is lost."""
        assert self.queue.finished == (len(self.done) == len(self.tasks))
        assert self.queue.failure is None

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.now += 100.0
        self.queue.expire(self.now)
        while isinstance(answer := self.queue.take("last/0", self.now), Task):
            assert answer.name not in self.done, "a task was handed out after it was done"
            assert self.before[answer.name] <= self.done
            assert self.queue.done("last/0", answer.name, 1.0, self.now)
            self.done.add(answer.name)
            self.counted += 1
        assert isinstance(answer, Finished)
        assert self.done == set(self.tasks)
        assert sum(share.tasks for share in answer.totals.shares) == self.counted
        assert answer.totals.done_before + self.counted == len(self.tasks), "each task counts once"


TestQueue = QueueMachine.TestCase
TestQueue.settings = hypothesis.settings(max_examples=60, stateful_step_count=30)
