"""Pages that another node fills: held until it can write no more, cached only when they are right on every rank."""

from __future__ import annotations

import pytest

from kvrelay.core.errors import CapacityError
from kvrelay.core.types import Incarnation
from kvrelay.prefill_node.fills import FillOrder, PullFrom
from kvrelay.prefill_node.jobs import CacheChanged, Event, FillEnded, Job
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.v1 import ring_pb2
from played_ring import BLOCK, PAGE, Ring, a_job

PAGES_PER_BLOCK = BLOCK // PAGE
SOURCE = PullFrom(Incarnation("source", 5), "there:1", 999, ring_size=3)


def an_order(job: Job, key: str = "fill", *, blocks: int = 4) -> FillOrder:
    return FillOrder(key, job.request, SOURCE, job.block_hashes[:blocks], timeout_s=7.0)


def begun(ring: Ring, job: Job) -> ring_pb2.RingFill:
    """Begin a fill, and return what the ranks hear of it."""
    assert ring.control.begin_fill(an_order(job))
    assert ring.control.wants_step
    (told,) = ring.control.plan(0.0).fills
    return told


def said(ring: Ring, rank: int = 0, **report: object) -> list[Event]:
    """Let a rank report."""
    return ring.control.applied([ring_pb2.RankReport(rank=rank, **report)])  # type: ignore[arg-type]


def ends(ring: Ring) -> tuple[list[str], list[str]]:
    """Return the fills that the next step says are taken, and those that it says are given up."""
    step = ring.control.plan(0.0)
    return list(step.fills_taken), list(step.fills_given_up)


def test_what_was_filled_is_cached_and_spares_its_computation() -> None:
    ring, job = Ring(), a_job("a", 150)
    told = begun(ring, job)
    assert (told.key, told.source_ranks, told.endpoint, told.timeout_ms) == ("fill", 3, "there:1", 7000)
    assert [(run.prompt_page, run.num_pages) for run in told.pages] == [(0, 4 * PAGES_PER_BLOCK)]
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK

    events = said(ring, fills_landed=["fill"])
    assert events == [CacheChanged(added=job.block_hashes[:4]), FillEnded("fill", num_tokens=4 * BLOCK)]
    assert ends(ring) == (["fill"], [])
    assert ends(ring) == ([], [])
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK
    said(ring, fills_free=["fill"])
    ring.control.submit(job, 0.0)
    ring.run()

    assert ring.chunks[0][1].start == 4 * BLOCK
    account = ring.pages.account()
    assert (account.pinned, account.cached) == (0, 4 * PAGES_PER_BLOCK)
    ring.pages.check()


def test_a_ring_has_a_prefix_when_every_rank_has_its_part_and_lets_go_when_all_have() -> None:
    ring, job = Ring(ring_size=3), a_job("a", 150)
    told = begun(ring, job)
    assert {run.rank for run in told.pages} == {0, 1, 2}
    assert sum(run.num_pages for run in told.pages) == 4 * PAGES_PER_BLOCK

    assert said(ring, 1, fills_landed=["fill"]) == []
    assert said(ring, 0, fills_landed=["fill"]) == []
    assert said(ring, 2, fills_landed=["fill"])[-1] == FillEnded("fill", num_tokens=4 * BLOCK)
    assert ends(ring) == (["fill"], [])
    for rank in range(3):
        assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK
        said(ring, rank, fills_free=["fill"])

    assert (ring.pages.account().pinned, len(ring.control.fills)) == (0, 0)
    ring.pages.check()


def test_one_rank_that_fails_ends_it_on_all_and_nothing_of_it_is_cached() -> None:
    ring, job = Ring(ring_size=3), a_job("a", 150)
    begun(ring, job)
    said(ring, 0, fills_landed=["fill"])

    events = said(ring, 1, fills_failed={"fill": "a wrong checksum"}, fills_free=["fill"])

    assert events == [FillEnded("fill", reason="a wrong checksum")]
    assert said(ring, 2, fills_failed={"fill": "given up"}) == []  # once is enough
    assert said(ring, 2, fills_landed=["fill"]) == []  # too late
    assert ends(ring) == ([], ["fill"])
    said(ring, 0, fills_free=["fill"])
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK
    said(ring, 2, fills_free=["fill"])
    account = ring.pages.account()
    assert (account.pinned, account.cached) == (0, 0)
    ring.pages.check()


def test_blocks_that_are_here_are_not_fetched_again() -> None:
    ring, job = Ring(), a_job("a", 150)
    ring.control.submit(a_job("first", 70), 0.0)
    ring.run()

    told = begun(ring, job)

    assert told.pages[0].prompt_page == 2 * PAGES_PER_BLOCK
    assert list(told.block_hashes) == list(job.block_hashes[:4])
    assert said(ring, fills_landed=["fill"])[-1] == FillEnded("fill", num_tokens=2 * BLOCK)
    said(ring, fills_free=["fill"])
    assert not ring.control.begin_fill(an_order(job, "again"))
    assert ring.pages.account().pinned == 0


def test_a_request_whose_blocks_are_fetched_has_its_place_in_the_queue() -> None:
    ring, job = Ring(max_jobs=2), a_job("a", 150)
    begun(ring, job)
    ring.control.submit(a_job("b", 150, prefix=1), 0.0)

    with pytest.raises(CapacityError, match="2 requests wait or run here, the limit is 2"):
        ring.control.submit(a_job("c", 150, prefix=2), 0.0)
    assert not ring.control.begin_fill(an_order(a_job("c", 150, prefix=2), "more"))

    said(ring, fills_landed=["fill"])  # its pages are held for a while; its place is the request's
    ring.control.submit(job, 0.0)
    said(ring, fills_free=["fill"])
    assert ring.control.active_jobs == 2


def test_a_fill_that_has_no_end_yet_takes_no_request_s_place() -> None:
    ring, job = Ring(max_jobs=1), a_job("a", 150)
    begun(ring, job)
    ring.control.give_up_fill("fill", "not wanted")
    said(ring, fills_quarantined=["fill"])

    ring.control.submit(a_job("b", 150, prefix=1), 0.0)

    assert ring.control.active_jobs == 1


def test_others_wait_for_a_fill_and_take_over_when_it_is_given_up() -> None:
    ring, job = Ring(), a_job("a", 150)
    begun(ring, job)
    ring.control.submit(job, 0.0)
    ring.step()
    assert ring.chunks == []
    assert not ring.control.begin_fill(an_order(job, "second"))  # it is on its way already

    ring.control.give_up_fill("fill", "not wanted")
    ring.control.give_up_fill("fill", "not wanted")
    assert ring.control.take_events() == [FillEnded("fill", reason="not wanted")]
    assert ring.control.wants_step
    ring.run()

    assert ring.chunks[0][1].start == 0
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK  # a writer may still write there
    said(ring, fills_free=["fill"])
    assert ring.pages.account().pinned == 0
    ring.pages.check()


def test_pages_whose_writer_may_live_are_quarantined_rank_by_rank_until_it_cannot_write() -> None:
    ring, job = Ring(ring_size=2), a_job("a", 150)
    ring.control.submit(a_job("first", 70), 0.0)
    ring.run()
    begun(ring, job)
    ring.control.give_up_fill("fill", "not wanted")

    said(ring, 1, fills_quarantined=["fill"])
    quarantined = ring.pages.account().quarantined
    assert 0 < quarantined < 2 * PAGES_PER_BLOCK
    said(ring, 0, fills_quarantined=["fill"])
    account = ring.pages.account()
    assert (account.quarantined, account.pinned) == (2 * PAGES_PER_BLOCK, 2 * PAGES_PER_BLOCK)

    said(ring, 0, fills_free=["fill"])
    assert ring.pages.account().quarantined == quarantined
    said(ring, 1, fills_free=["fill"])
    account = ring.pages.account()
    assert (account.quarantined, account.pinned) == (0, 0)
    ring.pages.check()


def test_without_room_nothing_is_fetched() -> None:
    ring, job = Ring(pages=4), a_job("a", 150)

    assert not ring.control.begin_fill(an_order(job))
    ring.control.give_up_fill("fill", "not wanted")  # of a fill that has not begun: nothing happens
    assert ring.control.take_events() == []
    assert ring.pages.account().free == 4


@pytest.mark.parametrize(
    ("start_id", "alive", "pages"),
    [(5, None, 4), (0, None, 4), (0, 6, 4), (0, 5, 0), (4, None, 0)],
)
def test_every_rank_hears_of_a_fence_and_the_pages_it_frees_are_counted(
    start_id: int, alive: int | None, pages: int
) -> None:
    ring = Ring(ring_size=2)
    begun(ring, a_job("a", 150))
    ring.control.give_up_fill("fill", "not wanted")
    ring.control.plan(0.0)
    said(ring, 0, fills_free=["fill"])  # of two ranks the other half is left
    fence = ring_pb2.RingFence(writer=incarnation_to_pb(Incarnation("source", start_id)))
    if alive is not None:
        fence.alive.CopyFrom(incarnation_to_pb(Incarnation("source", alive)))

    assert ring.control.fence_writer(fence) == pages
    assert ring.control.wants_step
    assert list(ring.control.plan(0.0).fences) == [fence]
    assert not ring.control.plan(0.0).fences
