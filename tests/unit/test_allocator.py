from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.core.errors import CapacityError
from kvrelay.core.types import PageRun
from kvrelay.kvcache.allocator import PageAllocator, pages_of, runs_of


def test_a_fresh_pool_gives_one_run() -> None:
    assert PageAllocator(100).allocate(70) == (PageRun(0, 70),)


def test_the_smallest_run_that_fits_is_taken() -> None:
    pages = PageAllocator(20)
    pages.allocate(20)
    pages.release([2, 3, 4, 10, 11, 15, 16, 17, 18])

    assert pages.allocate(2) == (PageRun(10, 2),)
    assert pages.allocate(4) == (PageRun(15, 4),)


def test_when_no_run_fits_the_longest_ones_come_first() -> None:
    pages = PageAllocator(20)
    pages.allocate(20)
    pages.release([0, 2, 3, 5, 6, 7, 9])

    assert pages.allocate(6) == (PageRun(5, 3), PageRun(2, 2), PageRun(0, 1))
    assert pages.free_pages == 1


def test_a_refusal_takes_nothing_and_names_the_numbers() -> None:
    pages = PageAllocator(10)
    pages.allocate(4)
    with pytest.raises(CapacityError, match="7 pages wanted, 6 of 10 are free"):
        pages.allocate(7)
    assert pages.free_pages == 6


def test_neighbours_are_joined_when_they_return() -> None:
    pages = PageAllocator(9)
    pages.allocate(9)
    for page in (3, 5, 4, 0, 8, 1, 2, 7, 6):
        pages.release([page])
        pages.check()
    assert pages.allocate(9) == (PageRun(0, 9),)


def test_a_shared_page_is_free_only_after_its_last_owner() -> None:
    pages = PageAllocator(4)
    held = pages_of(pages.allocate(2))
    pages.retain(held)

    assert pages.release(held) == ()
    assert pages.release(held) == tuple(held)


def test_a_free_page_cannot_be_shared_released_or_quarantined() -> None:
    pages = PageAllocator(4)
    for act in (pages.retain, pages.release, pages.quarantine):
        with pytest.raises(AssertionError, match="page 1 is free"):
            act([1])


def test_the_last_owner_of_a_quarantined_page_cannot_let_go() -> None:
    pages = PageAllocator(4)
    held = pages_of(pages.allocate(3))
    pages.quarantine(held)
    assert (pages.free_pages, pages.quarantined_pages) == (1, 3)
    with pytest.raises(AssertionError, match="quarantined"):
        pages.release(held)

    pages.unquarantine(held)
    pages.release(held)
    assert (pages.free_pages, pages.quarantined_pages) == (4, 0)


def test_runs_keep_the_order_of_their_pages() -> None:
    order = [4, 5, 9, 8, 0, 1, 2]
    assert runs_of(order) == (PageRun(4, 2), PageRun(9, 1), PageRun(8, 1), PageRun(0, 3))
    assert pages_of(runs_of(order)) == order


class AnySequenceOfCalls(RuleBasedStateMachine):
    """Compares the allocator with a list of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(23)
        self.owners: list[list[int]] = []  # each entry is one owner and the pages it holds
        self.quarantined: set[int] = set()

    @rule(num_pages=st.integers(0, 26))
    def allocate(self, num_pages: int) -> None:
        free = self.pages.free_pages
        longest = max((run.num_pages for run in self.pages._free.runs()), default=0)
        if num_pages > free:
            with pytest.raises(CapacityError):
                self.pages.allocate(num_pages)
            return
        runs = self.pages.allocate(num_pages)
        taken = pages_of(runs)
        held = {page for owner in self.owners for page in owner}
        assert len(set(taken)) == num_pages
        assert not held & set(taken), "a page is owned twice"
        assert len(runs) <= 1 or num_pages > longest, "a run that fits was cut up"
        self.owners.append(taken)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        shared = data.draw(st.sampled_from(self.owners))
        self.pages.retain(shared)
        self.owners.append(list(shared))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        if self.quarantined & set(self.owners[index]):
            return
        leaving = self.owners.pop(index)
        held = {page for owner in self.owners for page in owner}
        assert self.pages.release(leaving) == tuple(page for page in leaving if page not in held)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        marked = data.draw(st.sampled_from(self.owners))
        self.pages.quarantine(marked)
        self.quarantined |= set(marked)

    @rule()
    def unquarantine(self) -> None:
        self.pages.unquarantine(self.quarantined)
        self.quarantined.clear()

    @invariant()
    def no_page_is_lost_or_owned_twice(self) -> None:
        self.pages.check()
        held = {page for owner in self.owners for page in owner}
        assert self.pages.free_pages == self.pages.num_pages - len(held)
        assert self.pages.quarantined_pages == len(self.quarantined)
        for page in range(self.pages.num_pages):
            assert self.pages.refcount(page) == sum(page in owner for owner in self.owners)


TestAnySequenceOfCalls = AnySequenceOfCalls.TestCase
TestAnySequenceOfCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
