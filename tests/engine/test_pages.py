"""The page pool as a state machine: no page is owned twice, none is lost, and tampering is seen."""

from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from jaxmoe.engine.pages import PagePool
from jaxmoe.errors import EngineError
from jaxmoe.ops.pages import NULL_PAGE


@dataclass(slots=True)
class Request:
    """What one request believes to have."""

    reserved: int
    pages: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Requests that reserve, grow and end in any order, beside a model of two lists."""

    requests = Bundle("requests")

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.live: list[Request] = []

    def owned(self) -> list[int]:
        return [page for request in self.live for page in request.pages]

    def reserved(self) -> int:
        return sum(request.reserved for request in self.live)

    @rule(target=requests, count=st.integers(0, 12))
    def reserve(self, count: int) -> Request:
        request = Request(reserved=0)
        self.live.append(request)
        available = self.pool.available
        if count > available:
            with pytest.raises(EngineError) as error:
                self.pool.reserve(count)
            assert str(error.value) == f"{count} pages reserved with {available} available"
        else:
            self.pool.reserve(count)
            request.reserved = count
        return request

    @rule(request=requests, data=st.data())
    def allocate(self, request: Request, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, request.reserved))
        before = set(self.owned())
        allocation = self.pool.allocate(count)
        assert allocation.zero == allocation.pages, "every fresh page is zeroed"
        assert len(set(allocation.pages)) == count
        assert not before & set(allocation.pages), "a page has two owners"
        assert all(NULL_PAGE < page < self.pool.num_pages for page in allocation.pages)
        request.pages.extend(allocation.pages)
        request.reserved -= count

    @rule(extra=st.integers(1, 3))
    def allocate_too_much(self, extra: int) -> None:
        with pytest.raises(EngineError, match=f"pages allocated with {self.reserved()} reserved"):
            self.pool.allocate(self.reserved() + extra)

    @rule(request=consumes(requests))
    def release(self, request: Request) -> None:
        self.pool.release(request.pages, request.reserved)
        self.live.remove(request)
        if request.pages:
            with pytest.raises(EngineError, match="cannot be released"):
                self.pool.release(request.pages, 0)

    @rule(request=requests)
    def release_wrongly(self, request: Request) -> None:
        wrong: list[tuple[list[int], int]] = [
            ([NULL_PAGE], 0),
            ([self.pool.num_pages], 0),
            (request.pages, self.reserved() + 1),
            (request.pages, -1),
        ]
        if request.pages:
            wrong.append((request.pages * 2, 0))
        if self.pool.free_pages():
            wrong.append(([*request.pages, self.pool.free_pages()[0]], 0))
        for pages, unused in wrong:
            with pytest.raises(EngineError, match="cannot be released"):
                self.pool.release(pages, unused)

    @rule(count=st.integers(-3, -1))
    def negative_counts(self, count: int) -> None:
        for method in (self.pool.reserve, self.pool.allocate):
            with pytest.raises(EngineError):
                method(count)

    @invariant()
    def counts_agree(self) -> None:
        owned = self.owned()
        self.pool.check_integrity(owned)
        free = self.pool.free_pages()
        assert sorted([*owned, *free]) == list(range(1, self.pool.num_pages)), "a page is lost or has two owners"
        assert self.pool.used == len(owned)
        assert self.pool.available == len(free) - self.reserved() >= 0
        assert self.pool.usable == self.pool.num_pages - 1


TestPool = PoolMachine.TestCase
TestPool.settings = hypothesis.settings(max_examples=40, stateful_step_count=30)


def test_two_thousand_requests_lose_nothing() -> None:
    generator = np.random.default_rng(0)
    pool = PagePool(17)
    live: list[Request] = []
    for _ in range(2000):
        need = int(generator.integers(1, 9))
        while need > pool.available:
            done = live.pop(int(generator.integers(len(live))))
            pool.release(done.pages, done.reserved)
        pool.reserve(need)
        count = int(generator.integers(0, need + 1))
        live.append(Request(reserved=need - count, pages=list(pool.allocate(count).pages)))
        pool.check_integrity(page for request in live for page in request.pages)
    for request in live:
        pool.release(request.pages, request.reserved)
    assert (pool.used, pool.available) == (0, pool.usable)
    assert sorted(pool.free_pages()) == list(range(1, 17))


def _lose_free(pool: PagePool) -> None:
    pool._free.pop()


def _lose_used(pool: PagePool) -> None:
    pool._used.pop()


def _free_a_used_page(pool: PagePool) -> None:
    pool._free.append(next(iter(pool._used)))


def _invent(pool: PagePool) -> None:
    pool._free.append(pool.num_pages)


def _free_the_null_page(pool: PagePool) -> None:
    pool._free.append(NULL_PAGE)


@pytest.mark.parametrize("tamper", [_lose_free, _lose_used, _free_a_used_page, _invent, _free_the_null_page])
def test_tampering_is_seen(tamper: Callable[[PagePool], None]) -> None:
    pool = PagePool(6)
    pool.reserve(2)
    pages = pool.allocate(2).pages
    pool.check_integrity(pages)
    tamper(pool)
    with pytest.raises(EngineError, match="page pool is inconsistent: "):
        pool.check_integrity(pages)


def test_what_requests_believe_is_compared() -> None:
    pool = PagePool(6)
    pool.reserve(2)
    one, other = pool.allocate(2).pages
    for owned in ([one], [one, one], [one, other, other], [one, other, pool.free_pages()[0]], []):
        with pytest.raises(EngineError) as error:
            pool.check_integrity(owned)
        assert str(error.value) == (
            f"page pool is inconsistent: 3 free + 2 used of 5, requests own {len(owned)} ({len(set(owned))} distinct)"
        )


def test_wrong_pages_are_named() -> None:
    pool = PagePool(6)
    pool.reserve(1)
    (page,) = pool.allocate(1).pages
    with pytest.raises(EngineError) as error:
        pool.release([page, 5], 0)
    assert str(error.value) == "pages [5] and 0 reserved pages cannot be released"
    with pytest.raises(EngineError) as error:
        pool.release([page, page], 0)
    assert str(error.value) == f"pages [{page}, {page}] and 0 reserved pages cannot be released"
    pool.check_integrity([page])
