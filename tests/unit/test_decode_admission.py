from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.core.errors import CapacityError, InvalidRequestError
from kvrelay.decode_node import admission
from kvrelay.decode_node.admission import Grant, PageBook
from kvrelay.kvcache.allocator import PageAccount, runs_of


def a_book(num_pages: int) -> PageBook:
    return PageBook(num_pages=num_pages, page_tokens=64, block_tokens=128)


def test_pages_cover_prompt_and_output_up_front() -> None:
    book = a_book(10)
    assert len(book.reserve(prompt_tokens=64, max_tokens=65, hashes=[]).pages) == 2
    assert len(book.reserve(prompt_tokens=64, max_tokens=66, hashes=[]).pages) == 3


def test_a_request_no_empty_node_could_hold_is_invalid_and_named_in_pages() -> None:
    with pytest.raises(InvalidRequestError, match="need 11 pages of 64 tokens; this node has 10"):
        a_book(10).reserve(prompt_tokens=640, max_tokens=2, hashes=[])


def test_no_room_now_names_pages_wanted_free_and_evictable_and_takes_nothing() -> None:
    book = a_book(10)
    cached = book.reserve(prompt_tokens=128, max_tokens=1, hashes=[b"a"])
    book.cache_blocks([b"a"], cached.pages)
    book.release(cached.pages)
    book.reserve(prompt_tokens=128, max_tokens=1, hashes=[])
    before = book.account()

    with pytest.raises(CapacityError, match="9 pages wanted, 6 of 10 free, 2 evictable"):
        book.reserve(prompt_tokens=576, max_tokens=1, hashes=[])
    assert book.account() == before


def test_a_resident_prefix_is_shared_in_whole_blocks() -> None:
    book = a_book(10)
    first = book.reserve(prompt_tokens=300, max_tokens=10, hashes=[b"a", b"b"])
    book.cache_blocks([b"a", b"b"], first.pages)

    second = book.reserve(prompt_tokens=300, max_tokens=10, hashes=[b"a", b"b"])
    assert second.resident_tokens == 256
    assert second.pages[:4] == first.pages[:4]
    assert not set(second.pages[4:]) & set(first.pages)


def test_a_prompt_of_whole_blocks_can_be_fully_resident() -> None:
    book = a_book(10)
    first = book.reserve(prompt_tokens=256, max_tokens=10, hashes=[b"a", b"b"])
    book.cache_blocks([b"a", b"b"], first.pages)
    assert book.reserve(prompt_tokens=256, max_tokens=10, hashes=[b"a", b"b"]).resident_tokens == 256


def test_cached_blocks_make_room_when_it_is_needed_but_not_those_just_matched() -> None:
    book = a_book(6)
    for name in (b"a", b"b"):
        grant = book.reserve(prompt_tokens=128, max_tokens=1, hashes=[name])
        book.cache_blocks([name], grant.pages)
        book.release(grant.pages)
    assert book.account() == PageAccount(total=6, free=2, cached=4, pinned=0, quarantined=0)

    grant = book.reserve(prompt_tokens=300, max_tokens=1, hashes=[b"a", b"c"])
    assert (grant.resident_tokens, grant.evicted) == (128, (b"b",))
    with pytest.raises(CapacityError):
        book.reserve(prompt_tokens=300, max_tokens=1, hashes=[])


def pages_per_piece(num_pages: int) -> float:
    """Return the mean length of the runs that a full, busy node hands out: sessions come, are cached, and go."""
    book, rng = a_book(num_pages), random.Random(1)
    live: list[Grant] = []
    pages = pieces = 0
    for number in range(600):
        prompt_tokens = 64 * rng.randint(4, 160)
        names = [f"{number}/{block}".encode() for block in range(prompt_tokens // 128)]
        while len(live) > 8:
            book.release(live.pop(rng.randrange(len(live))).pages)
        grant = book.reserve(prompt_tokens=prompt_tokens, max_tokens=rng.randint(1, 2000), hashes=names)
        book.cache_blocks(names, grant.pages)
        live.append(grant)
        if number > 200:
            pages, pieces = pages + len(grant.pages), pieces + len(runs_of(grant.pages))
    book.check()
    return pages / pieces


def test_room_is_made_in_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pages_per_piece(4096)

    monkeypatch.setattr(admission, "_SPARE_SHARE", 1 << 30)  # no more than is needed at once
    assert found > 1.5 * pages_per_piece(4096)


def test_quarantined_pages_are_counted_apart() -> None:
    book = a_book(6)
    grant = book.reserve(prompt_tokens=128, max_tokens=1, hashes=[])
    book.quarantine(grant.pages)
    assert book.account() == PageAccount(total=6, free=4, cached=0, pinned=0, quarantined=2)
    book.unquarantine(grant.pages)
    book.release(grant.pages)
    assert book.account().free == 6


class AnySequenceOfRequests(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = a_book(16)
        self.held: list[tuple[list[bytes], Grant]] = []

    @rule(path=st.text("xy", max_size=4), tail_tokens=st.integers(0, 127), max_tokens=st.integers(1, 200))
    def reserve(self, path: str, tail_tokens: int, max_tokens: int) -> None:
        hashes = [path[: depth + 1].encode() for depth in range(len(path))]
        prompt_tokens = max(128 * len(hashes) + tail_tokens, 1)
        before = self.book.account()
        try:
            grant = self.book.reserve(prompt_tokens=prompt_tokens, max_tokens=max_tokens, hashes=hashes)
        except CapacityError:
            assert self.book.account() == before
            return
        assert len(set(grant.pages)) == len(grant.pages)
        assert len(grant.pages) * 64 >= prompt_tokens + max_tokens - 1
        written = set(grant.pages[grant.resident_tokens // 64 :])
        assert not any(written & set(other.pages) for _, other in self.held), "a page has two writers"
        self.held.append((hashes, grant))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), finished=st.booleans())
    def end(self, data: st.DataObject, finished: bool) -> None:
        hashes, grant = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if finished:
            self.book.cache_blocks(hashes, grant.pages)
        self.book.release(grant.pages)

    @invariant()
    def the_account_adds_up(self) -> None:
        self.book.check()
        account = self.book.account()
        pinned = {page for _, grant in self.held for page in grant.pages}
        assert account.pinned == len(pinned)
        assert account.total == account.free + account.cached + account.pinned + account.quarantined


TestAnySequenceOfRequests = AnySequenceOfRequests.TestCase
TestAnySequenceOfRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
