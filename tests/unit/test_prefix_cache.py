from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.core.errors import CapacityError
from kvrelay.core.types import PageRun
from kvrelay.kvcache.allocator import PageAllocator, pages_of
from kvrelay.kvcache.prefix_cache import PrefixCache


def cached_chain(pages: PageAllocator, cache: PrefixCache[int], *names: bytes, block_pages: int = 1) -> list[int]:
    """Cache a chain of blocks on new pages that only the cache keeps; return the pages."""
    parent = None
    held = pages_of(pages.allocate(len(names) * block_pages))
    for index, name in enumerate(names):
        cache.insert(name, held[index * block_pages : (index + 1) * block_pages], parent=parent)
        parent = name
    pages.release(held)
    return held


def test_the_longest_cached_prefix_is_found_in_order() -> None:
    pages = PageAllocator(8)
    cache = PrefixCache(pages)
    held = cached_chain(pages, cache, b"a", b"b", block_pages=2)

    assert cache.match([b"a", b"b", b"c"]) == [tuple(held[:2]), tuple(held[2:])]
    assert cache.match([b"x", b"b"]) == []


def test_cached_pages_outlive_the_request_that_wrote_them() -> None:
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    cached_chain(pages, cache, b"a")
    assert (pages.free_pages, cache.evictable_pages) == (3, 1)


def test_a_block_that_is_cached_already_is_left_as_it_is() -> None:
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    first = cached_chain(pages, cache, b"a")
    other = pages_of(pages.allocate(1))

    assert not cache.insert(b"a", other, parent=None)
    assert cache.match([b"a"]) == [tuple(first)]
    assert pages.release(other) == tuple(other)


def test_a_block_whose_parent_is_not_cached_is_not_cached() -> None:
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    held = pages_of(pages.allocate(1))
    assert not cache.insert(b"b", held, parent=b"a")
    assert pages.release(held) == tuple(held)


def test_children_are_evicted_before_their_parents() -> None:
    pages = PageAllocator(3)
    cache = PrefixCache(pages)
    cached_chain(pages, cache, b"a", b"b", b"c")
    assert cache.evict(2) == [b"c", b"b"]
    assert len(cache.match([b"a"])) == 1


def test_the_least_recently_used_leaf_goes_first() -> None:
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    cached_chain(pages, cache, b"a", b"a2")
    cached_chain(pages, cache, b"b", b"b2")
    cache.match([b"a", b"a2"])
    assert cache.evict(3) == [b"b2", b"b", b"a2"]


def test_a_block_in_use_is_spared_while_another_can_go() -> None:
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    in_use = cached_chain(pages, cache, b"old")
    pages.retain(in_use)
    cached_chain(pages, cache, b"new")

    assert cache.evict(2) == [b"new"]
    assert cache.evictable_pages == 0
    assert len(cache.match([b"old"])) == 1


def test_eviction_for_one_allocator_leaves_blocks_of_others_alone() -> None:
    pages = PageAllocator(8)
    cache = PrefixCache(pages)
    for name in (b"a", b"b", b"c"):
        cached_chain(pages, cache, name)  # pages 0, 1, 2

    assert cache.evict(2, lambda page: page >= 1) == [b"b", b"c"]
    assert cache.hashes() == [b"a"]
    cache.check()


def test_a_leaf_elsewhere_goes_when_a_wanted_page_lies_under_it() -> None:
    pages = PageAllocator(8)
    cache = PrefixCache(pages)
    cached_chain(pages, cache, b"a", b"b")  # pages 0, 1

    assert cache.evict(1, lambda page: page == 0) == [b"b", b"a"]


def test_an_unused_block_under_one_in_use_can_be_evicted() -> None:
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    _, leaf = cached_chain(pages, cache, b"a", b"b")
    pages.retain([leaf])  # a request that has its own copy of the first block

    assert cache.evictable_pages == 1
    assert cache.evict(1) == [b"b", b"a"]
    assert pages.free_pages == 3


def test_dropping_everything_frees_what_no_request_holds() -> None:
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    held = cached_chain(pages, cache, b"a", b"b")
    pages.retain(held[:1])
    assert cache.drop_all() == [b"b", b"a"]
    assert (len(cache), pages.free_pages) == (0, 3)


class Ranks:
    """Page owners of a ring of two, named (rank, page)."""

    def __init__(self) -> None:
        self.of_rank = (PageAllocator(2), PageAllocator(2))

    @property
    def cached_alone(self) -> int:
        return sum(allocator.cached_alone for allocator in self.of_rank)

    def cache(self, pages: Iterable[tuple[int, int]]) -> None:
        for rank, page in pages:
            self.of_rank[rank].cache([page])

    def uncache(self, pages: Iterable[tuple[int, int]]) -> None:
        for rank, page in pages:
            self.of_rank[rank].uncache([page])

    def release(self, pages: Iterable[tuple[int, int]]) -> None:
        for rank, page in pages:
            self.of_rank[rank].release([page])

    def refcount(self, page: tuple[int, int]) -> int:
        return self.of_rank[page[0]].refcount(page[1])


def test_pages_may_be_pairs_of_rank_and_page() -> None:
    ranks = Ranks()
    cache = PrefixCache(ranks)
    block = [(rank, pages_of(ranks.of_rank[rank].allocate(1))[0]) for rank in (0, 1)]
    assert cache.insert(b"a", block, parent=None)
    ranks.release(block)

    assert cache.match([b"a"]) == [tuple(block)]
    assert cache.evict(1) == [b"a"]
    assert [allocator.free_pages for allocator in ranks.of_rank] == [2, 2]


class AnySequenceOfRequests(RuleBasedStateMachine):
    """Requests over a small tree of prefixes come, cache their blocks, and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(20)
        self.cache = PrefixCache(self.pages)
        self.running: list[tuple[list[bytes], list[int]]] = []  # (names of its blocks, pages it holds: two each)

    @rule(path=st.text("xy", min_size=1, max_size=5))
    def start(self, path: str) -> None:
        names = [path[: depth + 1].encode() for depth in range(len(path))]
        resident = [page for block in self.cache.match(names) for page in block]
        self.pages.retain(resident)
        wanted = 2 * len(names) - len(resident)
        if wanted > self.pages.free_pages:
            before = self.pages.free_pages + self.cache.evictable_pages
            self.cache.evict(wanted - self.pages.free_pages)
            assert self.pages.free_pages >= min(wanted, before), "less was freed than could be"
        try:
            fresh = pages_of(self.pages.allocate(wanted))
        except CapacityError:
            self.pages.release(resident)
            return
        self.running.append((names, resident + fresh))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cache_blocks(self, data: st.DataObject) -> None:
        names, held = data.draw(st.sampled_from(self.running))
        for index, name in enumerate(names):
            self.cache.insert(name, held[2 * index : 2 * index + 2], parent=names[index - 1] if index else None)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        _, held = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pages.release(held)

    @rule()
    def drop_all(self) -> None:
        self.cache.drop_all()

    @invariant()
    def every_page_is_free_cached_or_pinned(self) -> None:
        self.pages.check()
        self.cache.check()
        pinned = {page for _, held in self.running for page in held}
        assert self.pages.free_pages + self.cache.evictable_pages + len(pinned) == self.pages.num_pages


TestAnySequenceOfRequests = AnySequenceOfRequests.TestCase
TestAnySequenceOfRequests.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_whole_prompt_is_evicted_in_one_go_and_comes_back_as_one_run() -> None:
    released: list[list[int]] = []

    class Counting(PageAllocator):
        def release(self, pages: Iterable[int]) -> tuple[int, ...]:
            released.append(list(pages))
            return super().release(released[-1])

    pages = Counting(120)
    cache = PrefixCache(pages)
    names = [b"%d" % number for number in range(100)]
    cached_chain(pages, cache, *names)
    cached_chain(pages, cache, b"younger")
    released.clear()

    assert cache.evict(60) == names[:39:-1]
    assert released == [list(range(40, 100))]
    assert pages.allocate(60) == (PageRun(40, 60),)
    cache.check()
