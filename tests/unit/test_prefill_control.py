"""Requirements of kvrelay.prefill_node.control and its page book."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core import prefix_hash
from kvrelay.core.errors import CapacityError, InvalidRequestError, StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.core.types import Sampling
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.jobs import CacheChanged, Computed, Event, Gone, HandoffFailed, Job, Opened, Phase
from kvrelay.prefill_node.pages import RequestPages, RingPages
from kvrelay.proto.v1 import common_pb2, ring_pb2

PAGE, BLOCK, CHUNK = 16, 32, 64


def a_job(name: str, tokens: int, *, prefix: int = 0, attempt: int = 1) -> Job:
    """Return a job whose prompt begins with the tokens of family `prefix` (same family: same beginning)."""
    prompt = np.arange(tokens, dtype=np.int32) + 1000 * prefix
    hashes = tuple(prefix_hash.chain(prefix_hash.seed(fingerprint=b"f"), prompt, block_tokens=BLOCK))
    ref = common_pb2.RequestRef(request_id=name, attempt=attempt)
    return Job(ref, prompt, Sampling(max_tokens=8), block_hashes=hashes)


class Ring:
    """A control with ranks that do what they are told and report it."""

    def __init__(self, *, ring_size: int = 1, pages: int = 64, max_jobs: int = 8, prefix_wait_s: float = 10.0) -> None:
        self.pages = RingPages(
            pages_per_rank=[pages] * ring_size,
            page_tokens=PAGE,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            align_tokens=1,
        )
        self.control = RingControl(
            self.pages, block_tokens=BLOCK, chunk_tokens=CHUNK, max_jobs=max_jobs, prefix_wait_s=prefix_wait_s
        )
        self.ring_size = ring_size
        self.closed: list[set[str]] = [set() for _ in range(ring_size)]
        self.chunks: list[tuple[str, Span]] = []
        self.now_s = 0.0

    def step(self, *, stopped: bool = False, drain: bool = True, failed: dict[str, str] | None = None) -> list[Event]:
        self.now_s += 1.0
        step = self.control.plan(self.now_s)
        if step.HasField("chunk") and not stopped:
            self.chunks.append((step.chunk.request_id, Span(step.chunk.tokens.start, step.chunk.tokens.end)))
        reports = []
        for rank in range(self.ring_size):
            self.closed[rank] |= set(step.closes)
            report = ring_pb2.RankReport(step_id=step.step_id, rank=rank, stopped=stopped, failed=failed or {})
            if drain:
                report.drained.extend(sorted(self.closed[rank]))
                self.closed[rank].clear()
            reports.append(report)
        return self.control.applied(reports)

    def run(self, steps: int = 200) -> list[Event]:
        """Step until nothing is left to do, closing jobs when they are computed, and return all events."""
        events: list[Event] = []
        for _ in range(steps):
            for key in {key for key, _ in self.chunks}:
                if self.control.phase_of(key) is Phase.SEALING:
                    self.control.close(key, abort=True)
            events += self.step()
            if not self.control.active_jobs and not self.control.closing_jobs:
                break
        return events


def test_a_prompt_is_computed_in_chunks_and_its_full_blocks_stay_cached() -> None:
    ring = Ring()
    job = a_job("a", 150)
    ring.control.submit(job, 0.0)

    events = ring.run()

    assert ring.chunks == [("a#1", Span(0, 64)), ("a#1", Span(64, 128)), ("a#1", Span(128, 150))]
    assert [event for event in events if isinstance(event, Opened)] == [Opened("a#1", 0, 1.0)]
    added = [name for event in events if isinstance(event, CacheChanged) for name in event.added]
    assert added == list(job.block_hashes)
    account = ring.pages.account()
    assert (account.cached, account.pinned) == (8, 0)
    assert account.total == account.free + account.cached


def test_a_second_request_computes_only_what_is_not_cached() -> None:
    ring = Ring()
    ring.control.submit(a_job("a", 150), 0.0)
    ring.run()
    ring.chunks.clear()

    ring.control.submit(a_job("b", 140), ring.now_s)
    events = ring.run()

    assert Opened("b#1", 128, 1.0) in events
    assert ring.chunks == [("b#1", Span(128, 140))]


def test_a_request_for_prompt_logprobs_computes_what_is_cached_and_shares_what_it_computed() -> None:
    ring = Ring()
    ring.control.submit(a_job("a", 64), 0.0)
    ring.run()
    ring.chunks.clear()
    asks = dataclasses.replace(a_job("b", 150), sampling=Sampling(max_tokens=8, prompt_logprobs=True))

    ring.control.submit(asks, ring.now_s)
    events = ring.run()

    assert Opened("b#1", 0, 1.0) in events
    assert ring.chunks[0] == ("b#1", Span(0, 64))
    assert [name for one in events if isinstance(one, CacheChanged) for name in one.added] == list(
        asks.block_hashes[2:]
    )
    account = ring.pages.account()
    assert (account.cached, account.pinned) == (8, 0)


def test_a_chunk_carries_the_token_behind_it() -> None:
    ring = Ring()
    ring.control.submit(a_job("a", 70), 0.0)

    first = ring.control.plan(1.0).chunk
    ring.control.applied([])
    last = ring.control.plan(2.0).chunk

    assert (first.HasField("next_id"), first.next_id) == (True, 64)
    assert not last.HasField("next_id")


def test_the_last_token_is_computed_even_when_the_whole_prompt_is_cached() -> None:
    ring = Ring()
    ring.control.submit(a_job("a", 128), 0.0)
    ring.run()
    ring.chunks.clear()

    ring.control.submit(a_job("b", 128), ring.now_s)
    ring.run()

    assert ring.chunks == [("b#1", Span(112, 128))]


def test_requests_with_one_new_prefix_compute_it_once() -> None:
    ring = Ring(pages=256, max_jobs=64)
    for number in range(10):
        ring.control.submit(a_job(f"r{number}", 130), 0.0)

    ring.run()

    assert sum(tokens.num_tokens for _, tokens in ring.chunks) == 130 + 9 * 2


def test_a_waiting_request_takes_over_when_the_one_it_waits_for_fails() -> None:
    ring = Ring()
    ring.control.submit(a_job("owner", 200), 0.0)
    ring.control.submit(a_job("waiter", 200), 0.0)
    ring.step()
    assert ring.control.phase_of("waiter#1") is Phase.QUEUED

    ring.control.close("owner#1", abort=True)
    ring.step()

    assert ring.control.phase_of("waiter#1") is Phase.RUNNING
    assert ring.chunks[1] == ("waiter#1", Span(64, 128))


def test_the_wait_for_a_prefix_is_bounded() -> None:
    ring = Ring(prefix_wait_s=3.0)
    ring.control.submit(a_job("owner", 300), 0.0)
    ring.control.submit(a_job("waiter", 300), 0.0)
    for _ in range(3):
        ring.step(stopped=True)  # the owner makes no progress
    assert ring.control.phase_of("waiter#1") is Phase.QUEUED

    ring.step(stopped=True)

    assert ring.control.phase_of("waiter#1") is Phase.RUNNING


def test_a_failed_chunk_never_commits() -> None:
    ring = Ring()
    ring.control.submit(a_job("a", 64), 0.0)

    events = ring.step(stopped=True)
    ring.control.close("a#1", abort=True)
    events += ring.step()

    assert not [event for event in events if isinstance(event, Computed | CacheChanged)]
    assert ring.pages.account().free == ring.pages.account().total


def test_pages_come_back_only_when_every_rank_has_drained() -> None:
    ring = Ring(ring_size=3)
    ring.control.submit(a_job("a", 20), 0.0)
    ring.step()
    ring.control.close("a#1", abort=True)
    step = ring.control.plan(2.0)
    assert list(step.closes) == list(step.aborts) == ["a#1"]
    drained = [ring_pb2.RankReport(rank=rank, drained=["a#1"]) for rank in range(3)]

    for report in drained[:2]:
        assert ring.control.applied([report]) == []
        assert ring.pages.account().pinned == 2

    assert ring.control.applied(drained[2:]) == [Gone("a#1")]
    assert ring.pages.account().pinned == 0


def test_a_hand_off_that_fails_on_any_rank_is_reported_with_its_reason() -> None:
    ring = Ring(ring_size=2)
    ring.control.submit(a_job("a", 20), 0.0)

    assert HandoffFailed("a#1", "decode left") in ring.step(failed={"a#1": "decode left"})


def test_refusals_say_what_was_wanted_and_what_is_there() -> None:
    ring = Ring(pages=4, max_jobs=1)
    with pytest.raises(InvalidRequestError, match="65 tokens needs 5 pages of rank 0, which has 4"):
        ring.control.submit(a_job("big", 65), 0.0)
    ring.control.submit(a_job("a", 10), 0.0)
    with pytest.raises(StaleMessageError, match="attempt 1"):
        ring.control.submit(a_job("a", 10), 0.0)
    with pytest.raises(CapacityError, match="limit is 1"):
        ring.control.submit(a_job("b", 10), 0.0)


def test_a_request_without_room_waits_and_small_ones_pass_it_a_bounded_number_of_times() -> None:
    ring = Ring(pages=8, max_jobs=100)
    ring.control.submit(a_job("holds", 100, prefix=1), 0.0)
    ring.step()
    ring.control.submit(a_job("large", 100, prefix=2), 0.0)
    for number in range(30):
        ring.control.submit(a_job(f"small{number}", 10, prefix=3 + number), 0.0)
    opened: list[str] = []
    for _ in range(100):  # "holds" never ends; small ones do
        events = ring.step()
        opened += [event.key for event in events if isinstance(event, Opened)]
        for key in opened:
            if key.startswith("small") and ring.control.phase_of(key) is Phase.SEALING:
                ring.control.close(key, abort=True)
    assert 0 < len(opened) <= 17
    assert "large#1" not in opened

    ring.control.close("holds#1", abort=True)
    ring.step()
    ring.step()

    assert ring.control.phase_of("large#1") is Phase.RUNNING


class CountingPages(RingPages):
    """Counts how often somebody looks for room or for cached blocks."""

    num_asked = 0

    def take(self, hashes: Sequence[bytes], prompt_tokens: int) -> tuple[RequestPages | None, list[bytes]]:
        self.num_asked += 1
        return super().take(hashes, prompt_tokens)

    def cached_blocks(self, hashes: Sequence[bytes]) -> int:
        self.num_asked += 1
        return super().cached_blocks(hashes)


def test_a_request_without_room_is_looked_at_again_only_when_room_may_have_come() -> None:
    pages = CountingPages(pages_per_rank=[8], page_tokens=PAGE, block_tokens=BLOCK, chunk_tokens=CHUNK, align_tokens=1)
    ring = Ring()
    ring.control = RingControl(pages, block_tokens=BLOCK, chunk_tokens=CHUNK, max_jobs=8, prefix_wait_s=10.0)
    ring.control.submit(a_job("holds", 100, prefix=1), 0.0)
    for _ in range(3):
        ring.step()
    ring.control.submit(a_job("large", 100, prefix=2), 0.0)
    ring.step()
    asked = pages.num_asked
    for _ in range(50):
        ring.step()
    assert (pages.num_asked, ring.control.wants_step) == (asked, False)

    ring.control.close("holds#1", abort=True)
    wanted = [ring.control.wants_step]  # the close must be told
    ring.step()
    wanted += [ring.control.wants_step]  # its pages are back
    ring.step()

    assert wanted == [True, True]
    assert ring.control.phase_of("large#1") is Phase.RUNNING


def test_a_rank_that_is_short_of_pages_costs_no_cached_block_of_another_rank() -> None:
    pages = RingPages(pages_per_rank=[4, 40], page_tokens=PAGE, block_tokens=PAGE, chunk_tokens=CHUNK, align_tokens=1)
    cached: dict[bytes, int] = {}
    for number in range(4):  # one page each, by turns on either rank
        job = a_job(str(number), PAGE, prefix=number + 1)
        held, _ = pages.take((), PAGE * (1 + number % 2))
        assert held is not None
        name = job.key.encode()
        pages.commit([name], held, Span(0, 1))
        cached[name] = held.pages[0][0]
        pages.release(held.pages)
    assert pages.account().cached == 4

    taken, evicted = pages.take((), 8 * PAGE)

    assert taken is not None
    assert evicted
    assert all(cached[name] == 0 for name in evicted)
    pages.check()


def test_nothing_is_evicted_for_a_request_that_does_not_fit_anyway() -> None:
    pages = RingPages(pages_per_rank=[4, 40], page_tokens=PAGE, block_tokens=PAGE, chunk_tokens=CHUNK, align_tokens=1)
    holds, _ = pages.take((), 6 * PAGE)
    other, _ = pages.take((), PAGE)
    assert holds is not None
    assert other is not None
    pages.commit([b"other"], other, Span(0, 1))
    pages.release(other.pages)
    assert pages.account().cached == 1

    assert pages.take((), 8 * PAGE) == (None, [])


def test_an_older_attempt_may_close_while_the_newer_one_runs() -> None:
    ring = Ring()
    ring.control.submit(a_job("a", 200), 0.0)
    ring.step()
    ring.control.close("a#1", abort=True)
    ring.control.submit(a_job("a", 200, attempt=2), 1.0)

    ring.step(drain=False)

    assert ring.control.phase_of("a#1") is Phase.CLOSING
    assert ring.control.phase_of("a#2") is Phase.RUNNING


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 300), st.integers(0, 2)),
        st.tuples(st.just("close"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.sampled_from([0, 0, 0, 1]), st.integers(0, 1)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, ring_size=st.integers(1, 3), pages=st.integers(8, 40))
def test_pages_add_up_after_any_sequence_and_all_come_back(
    actions: list[tuple[str, int, int]], ring_size: int, pages: int
) -> None:
    ring = Ring(ring_size=ring_size, pages=pages, max_jobs=12)
    names: list[str] = []
    for kind, first, second in actions:
        if kind == "submit":
            job = a_job(f"r{len(names)}", first, prefix=second)
            try:
                ring.control.submit(job, ring.now_s)
                names.append(job.key)
            except (CapacityError, InvalidRequestError):
                continue
        elif kind == "close" and names:
            ring.control.close(names[first % len(names)], abort=True)
        else:
            ring.step(stopped=bool(first), drain=bool(second))
        ring.pages.check()
        account = ring.pages.account()
        assert account.total == account.free + account.cached + account.pinned + account.quarantined

    ring.run(steps=500)

    assert ring.control.active_jobs == ring.control.closing_jobs == 0
    assert ring.pages.account().pinned == 0
    account = ring.pages.account()
    assert account.free + account.cached == account.total
