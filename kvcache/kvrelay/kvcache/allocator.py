"""Which pages of a pool are free, and who holds the others. Pure; owned by one thread.

A page is free, or held by one or more owners (a count), or held and quarantined: a writer that cannot be proven dead
may still write into it. The prefix cache is an owner that others may do without, so what it alone holds is counted.
Free pages are kept as maximal runs, because one long run moves several times faster over the wire than the same pages
scattered.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrelay.core.errors import CapacityError
from kvrelay.core.types import PageRun


def pages_of(runs: Iterable[PageRun]) -> list[int]:
    """Return the pages of `runs`, in order."""
    return [page for run in runs for page in range(run.first_page, run.first_page + run.num_pages)]


def runs_of(pages: Iterable[int]) -> tuple[PageRun, ...]:
    """Return the fewest runs that list `pages` in the order given."""
    runs: list[PageRun] = []
    first = end = -1
    for page in pages:
        if page != end:
            if end > first:
                runs.append(PageRun(first, end - first))
            first = page
        end = page + 1
    if end > first:
        runs.append(PageRun(first, end - first))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class PageAccount:
    """Every page of a node is in exactly one of these; total is their sum."""

    total: int
    free: int
    cached: int  # only the prefix cache holds them
    pinned: int  # requests and hand-offs hold them
    quarantined: int  # a writer whose end is not proven may still write into them


class PageAllocator:
    """Reference counts over pages [0, num_pages); hands out the longest runs it has."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, "a pool has at least one page"
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._is_cached = bytearray(num_pages)
        self.cached_alone = 0  # pages that only the prefix cache holds
        self._quarantined: set[int] = set()
        self._free = FreeRuns()
        self._free.put(0, num_pages)

    @property
    def free_pages(self) -> int:
        return self._free.num_pages

    @property
    def quarantined_pages(self) -> int:
        return len(self._quarantined)

    def refcount(self, page: int) -> int:
        return self._refs[page]

    def allocate(self, num_pages: int) -> tuple[PageRun, ...]:
        """Take pages; each is then held once.

        Returns:
            One run, the smallest free one that fits, cut to size; when none fits, the longest ones first.

        Raises:
            CapacityError: fewer pages are free. Nothing is taken.
        """
        if num_pages > self.free_pages:
            raise CapacityError(f"{num_pages} pages wanted, {self.free_pages} of {self.num_pages} are free")
        runs = self._free.take(num_pages)
        for page in pages_of(runs):
            self._refs[page] = 1
        return runs

    def retain(self, pages: Iterable[int]) -> None:
        """Add one owner to pages that are held already."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free and cannot be shared"
            if self._refs[page] == 1 and self._is_cached[page]:
                self.cached_alone -= 1
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Drop one owner of each page; return those that are free again, in the order given."""
        freed: list[int] = []
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free already"
            assert self._refs[page] > 1 or page not in self._quarantined, f"page {page} is quarantined"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                assert not self._is_cached[page], f"page {page} is cached: `uncache` it"
                freed.append(page)
            elif self._refs[page] == 1 and self._is_cached[page]:
                self.cached_alone += 1
        for run in runs_of(freed):
            self._free.put(run.first_page, run.num_pages)
        return tuple(freed)

    def cache(self, pages: Iterable[int]) -> None:
        """Make the prefix cache one more owner of pages that somebody holds."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free and cannot be cached"
            assert not self._is_cached[page], f"page {page} is cached already"
            self._is_cached[page] = True
            self._refs[page] += 1

    def uncache(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Drop the prefix cache's hold on pages; return those that are free again, in the order given."""
        for page in pages:
            assert self._is_cached[page], f"page {page} is not cached"
            self._is_cached[page] = False
            self.cached_alone -= self._refs[page] == 1
        return self.release(pages)

    def quarantine(self, pages: Iterable[int]) -> None:
        """Mark held pages as unsafe; until `unquarantine` their last owner cannot let go of them."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free and cannot be quarantined"
            self._quarantined.add(page)

    def unquarantine(self, pages: Iterable[int]) -> None:
        """Take the mark away: the writer's end is proven. The pages stay held."""
        for page in pages:
            assert page in self._quarantined, f"page {page} is not quarantined"
            self._quarantined.remove(page)

    def check(self) -> None:
        """Assert that every page is either held or in exactly one free run."""
        free = self._free.runs()
        listed = pages_of(free)
        assert len(listed) == len(set(listed)) == self.free_pages, "a page is in two free runs"
        assert all(self._refs[page] == 0 for page in listed), "a free page has an owner"
        assert self.free_pages + sum(refs > 0 for refs in self._refs) == self.num_pages, "a page is lost"
        assert all(self._refs[page] > 0 for page in self._quarantined), "a quarantined page is free"
        alone = sum(refs == 1 and cached for refs, cached in zip(self._refs, self._is_cached, strict=True))
        assert self.cached_alone == alone, "the pages of the cache alone are miscounted"
        assert all(a.first_page + a.num_pages < b.first_page for a, b in pairwise(free)), "two free runs touch"


class FreeRuns:
    """Maximal runs of free pages, found by length and by either end."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._by_length: list[tuple[int, int]] = []  # (num_pages, first_page), sorted
        self._length_at: dict[int, int] = {}  # first_page -> num_pages
        self._first_of_end: dict[int, int] = {}  # page after the run -> first_page

    def runs(self) -> Sequence[PageRun]:
        """Return all runs in page order."""
        return [PageRun(first, self._length_at[first]) for first in sorted(self._length_at)]

    def put(self, first_page: int, num_pages: int) -> None:
        """Add a run and join it with its neighbours."""
        self.num_pages += num_pages
        before = self._first_of_end.get(first_page)
        if before is not None:
            num_pages += self._remove(before)
            first_page = before
        if first_page + num_pages in self._length_at:
            num_pages += self._remove(first_page + num_pages)
        self._add(first_page, num_pages)

    def take(self, num_pages: int) -> tuple[PageRun, ...]:
        """Remove exactly `num_pages` pages, which must be there, from as few runs as possible."""
        self.num_pages -= num_pages
        taken: list[PageRun] = []
        while num_pages:
            fits = bisect_left(self._by_length, (num_pages, 0))
            length, first = self._by_length[min(fits, len(self._by_length) - 1)]
            self._remove(first)
            used = min(length, num_pages)
            if length > used:
                self._add(first + used, length - used)
            taken.append(PageRun(first, used))
            num_pages -= used
        return tuple(taken)

    def _add(self, first_page: int, num_pages: int) -> None:
        insort(self._by_length, (num_pages, first_page))
        self._length_at[first_page] = num_pages
        self._first_of_end[first_page + num_pages] = first_page

    def _remove(self, first_page: int) -> int:
        num_pages = self._length_at.pop(first_page)
        del self._first_of_end[first_page + num_pages]
        del self._by_length[bisect_left(self._by_length, (num_pages, first_page))]
        return num_pages
