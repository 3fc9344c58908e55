"""PagePool: the pages of one device, on the host side."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxmoe.errors import EngineError
from jaxmoe.ops.pages import NULL_PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Fresh pages, and those that the step which first uses them must zero: it comes with the result, unforgettable."""

    pages: tuple[int, ...]
    zero: tuple[int, ...]


class PagePool:
    """Hands out pages and takes them back; reservations make sure that a started request can finish.

    Invariants: free and used pages are disjoint and together all pages but the null page; reserved <= free pages.
    """

    def __init__(self, num_pages: int):
        """Args: num_pages: pages of the pool, the null page included."""
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._used: set[int] = set()
        self._reserved = 0
        self.num_pages = num_pages

    @property
    def usable(self) -> int:
        """Pages that requests can have."""
        return self.num_pages - 1

    @property
    def used(self) -> int:
        """Pages that requests have."""
        return len(self._used)

    @property
    def available(self) -> int:
        """Free pages that nobody reserved."""
        return len(self._free) - self._reserved

    def reserve(self, count: int) -> None:
        """Sets pages aside for later `allocate` calls of a request.

        Raises:
            EngineError: fewer are available, or the count is negative.
        """
        if not 0 <= count <= self.available:
            raise EngineError(f"{count} pages reserved with {self.available} available")
        self._reserved += count

    def allocate(self, count: int) -> Allocation:
        """Takes reserved pages.

        Raises:
            EngineError: more than were reserved, or the count is negative.
        """
        if not 0 <= count <= self._reserved:
            raise EngineError(f"{count} pages allocated with {self._reserved} reserved")
        self._reserved -= count
        pages = tuple(self._free.pop() for _ in range(count))
        self._used.update(pages)
        return Allocation(pages=pages, zero=pages)

    def release(self, pages: Iterable[int], unused_reservation: int) -> None:
        """Takes pages and a rest of a reservation back.

        Raises:
            EngineError: a page is not in use, or the reservation is smaller.
        """
        pages = list(pages)
        wrong = [page for page in pages if page not in self._used]
        if wrong or len(set(pages)) != len(pages) or not 0 <= unused_reservation <= self._reserved:
            raise EngineError(f"pages {wrong or pages} and {unused_reservation} reserved pages cannot be released")
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))
        self._reserved -= unused_reservation

    def free_pages(self) -> tuple[int, ...]:
        """Pages that nobody has, for poisoning in debug mode."""
        return tuple(self._free)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Compares the pool with what its requests believe to own; called when the engine is idle and in tests.

        Raises:
            EngineError: a page is lost, owned twice, or both free and used.
        """
        owned = list(owned)
        everything = sorted([*self._free, *self._used])
        if everything != list(range(1, self.num_pages)) or sorted(owned) != sorted(self._used):
            raise EngineError(
                f"page pool is inconsistent: {len(self._free)} free + {len(self._used)} used of {self.usable}, "
                f"requests own {len(owned)} ({len(set(owned))} distinct)"
            )
