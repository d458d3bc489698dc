"""Requirements of kvrelay.prefill_node.control: which chunk comes next, and when a request has gone."""

from __future__ import annotations

import dataclasses

import pytest

from kvrelay.core.errors import CapacityError, InvalidRequestError, StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.core.types import Sampling
from kvrelay.prefill_node.jobs import CacheChanged, Computed, Gone, HandoffFailed, Opened, Phase
from kvrelay.proto.v1 import ring_pb2
from played_ring import Ring, a_job


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


def test_an_older_attempt_may_close_while_the_newer_one_runs() -> None:
    ring = Ring()
    ring.control.submit(a_job("a", 200), 0.0)
    ring.step()
    ring.control.close("a#1", abort=True)
    ring.control.submit(a_job("a", 200, attempt=2), 1.0)

    ring.step(drain=False)

    assert ring.control.phase_of("a#1") is Phase.CLOSING
    assert ring.control.phase_of("a#2") is Phase.RUNNING
