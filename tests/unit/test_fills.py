"""Pages that another node fills: held until it can write no more, cached only when they are right."""

from __future__ import annotations

import pytest

from kvrelay.core.errors import CapacityError
from kvrelay.prefill_node.jobs import CacheChanged, Job
from played_ring import BLOCK, PAGE, Ring, a_job

PAGES_PER_BLOCK = BLOCK // PAGE


def begun(ring: Ring, job: Job, *, blocks: int = 4) -> list[int]:
    fill = ring.control.begin_fill("fill", job.block_hashes[:blocks])
    assert fill is not None
    return list(fill.pages)


def test_what_was_filled_is_cached_and_spares_its_computation() -> None:
    ring, job = Ring(), a_job("a", 150)
    assert len(begun(ring, job)) == 4 * PAGES_PER_BLOCK
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK

    ring.control.complete_fill("fill")
    ring.control.end_fill("fill")
    ring.control.submit(job, 0.0)
    events = ring.run()

    assert ring.chunks[0][1].start == 4 * BLOCK
    assert events[0] == CacheChanged(added=job.block_hashes[:4])
    account = ring.pages.account()
    assert (account.pinned, account.cached) == (0, 4 * PAGES_PER_BLOCK)
    ring.pages.check()


def test_blocks_that_are_here_are_not_fetched_again() -> None:
    ring, job = Ring(), a_job("a", 150)
    ring.control.submit(a_job("first", 70), 0.0)
    ring.run()

    fill = ring.control.begin_fill("fill", job.block_hashes[:4])

    assert fill is not None
    assert fill.cached_tokens == 64
    ring.control.end_fill("fill")
    assert ring.control.begin_fill("again", job.block_hashes[:2]) is None
    assert ring.pages.account().pinned == 0


def test_a_request_whose_blocks_are_fetched_has_its_place_in_the_queue() -> None:
    ring, job = Ring(max_jobs=2), a_job("a", 150)
    begun(ring, job)
    ring.control.submit(a_job("b", 150, prefix=1), 0.0)

    with pytest.raises(CapacityError, match="2 requests wait or run here, the limit is 2"):
        ring.control.submit(a_job("c", 150, prefix=2), 0.0)
    assert ring.control.begin_fill("more", a_job("c", 150, prefix=2).block_hashes[:4]) is None

    ring.control.complete_fill("fill")  # its pages are held for a while; its place is the request's
    ring.control.submit(job, 0.0)
    ring.control.end_fill("fill")
    assert ring.control.active_jobs == 2


def test_a_fill_that_has_no_end_yet_takes_no_request_s_place() -> None:
    ring, job = Ring(max_jobs=1), a_job("a", 150)
    begun(ring, job)
    ring.control.give_up_fill("fill")
    ring.control.quarantine_fill("fill")

    ring.control.submit(a_job("b", 150, prefix=1), 0.0)

    assert ring.control.active_jobs == 1


def test_others_wait_for_a_fill_and_take_over_when_it_is_given_up() -> None:
    ring, job = Ring(), a_job("a", 150)
    begun(ring, job)
    ring.control.submit(job, 0.0)
    ring.step()
    assert ring.chunks == []
    assert ring.control.begin_fill("second", job.block_hashes[:4]) is None  # it is on its way already

    ring.control.give_up_fill("fill")
    assert ring.control.wants_step
    ring.run()

    assert ring.chunks[0][1].start == 0
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK  # a writer may still write there
    ring.control.end_fill("fill")
    assert ring.pages.account().pinned == 0
    ring.pages.check()


def test_pages_whose_writer_may_live_are_quarantined_until_it_cannot_write() -> None:
    ring, job = Ring(), a_job("a", 150)
    ring.control.submit(a_job("first", 70), 0.0)
    ring.run()
    begun(ring, job)
    ring.control.give_up_fill("fill")

    ring.control.quarantine_fill("fill")
    account = ring.pages.account()
    assert (account.quarantined, account.pinned) == (2 * PAGES_PER_BLOCK, 2 * PAGES_PER_BLOCK)

    ring.control.end_fill("fill")
    account = ring.pages.account()
    assert (account.quarantined, account.pinned) == (0, 0)
    ring.pages.check()


def test_without_room_nothing_is_fetched() -> None:
    ring, job = Ring(pages=4), a_job("a", 150)

    assert ring.control.begin_fill("fill", job.block_hashes[:4]) is None
    ring.control.end_fill("fill")  # of a fill that has not begun: nothing happens
    assert ring.pages.account().free == 4
