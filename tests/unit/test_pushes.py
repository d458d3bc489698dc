"""Cached blocks on their way to another node: held until no rank can still read them, whatever else happens."""

from __future__ import annotations

import pytest

from kvrelay.core.errors import CapacityError, StaleMessageError
from kvrelay.prefill_node.jobs import Gone, Phase
from kvrelay.prefill_node.pushes import Push
from kvrelay.proto.v1 import handoff_pb2
from played_ring import BLOCK, PAGE, Ring, a_job

PAGES_PER_BLOCK = BLOCK // PAGE
TICKET = handoff_pb2.Ticket(prompt_tokens=4 * BLOCK)


def cached(ring_size: int = 1) -> tuple[Ring, Push]:
    """A ring that has four blocks, and a push of them."""
    ring, job = Ring(ring_size=ring_size), a_job("a", 150)
    ring.control.submit(job, 0.0)
    ring.run()
    return ring, Push("push", TICKET, job.block_hashes[:4])


@pytest.mark.parametrize("ring_size", [1, 3])
def test_every_rank_is_told_once_and_the_pages_are_held_until_all_have_drained(ring_size: int) -> None:
    ring, push = cached(ring_size)

    ring.control.pushes.begin(push)
    assert ring.control.wants_step
    step = ring.control.plan(0.0)

    (told,) = step.pushes
    assert (told.key, told.ticket) == ("push", TICKET)
    assert {run.rank for run in told.pages} == set(range(ring_size))
    covered = [run.prompt_page + i for run in told.pages for i in range(run.num_pages)]
    assert covered == list(range(4 * PAGES_PER_BLOCK))
    assert not ring.control.plan(0.0).pushes
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK

    assert ring.control.close("push", abort=False)
    assert not ring.control.close("push", abort=True)  # once is enough
    assert ring.control.phase_of("push") is Phase.CLOSING
    assert ring.step(drain=False) == []
    assert ring.pages.account().pinned == 4 * PAGES_PER_BLOCK

    assert ring.step() == [Gone("push")]
    assert (ring.pages.account().pinned, len(ring.control.pushes)) == (0, 0)
    ring.pages.check()


def test_blocks_that_are_pushed_are_not_evicted_and_others_find_room_when_it_is_over() -> None:
    ring, push = cached()
    ring.control.pushes.begin(push)
    whole = a_job("b", 64 * PAGE, prefix=1)  # all pages of the node
    ring.control.submit(whole, 0.0)
    ring.step()
    assert ring.control.phase_of(whole.key) is Phase.QUEUED

    ring.control.close("push", abort=True)
    ring.step()
    ring.step()

    assert ring.control.phase_of(whole.key) is not Phase.QUEUED


def test_what_is_not_here_and_what_is_too_much_is_refused_and_holds_nothing() -> None:
    ring, push = cached()
    other = a_job("b", 150, prefix=1)
    with pytest.raises(StaleMessageError, match="0 of 4 blocks"):
        ring.control.pushes.begin(Push("other", TICKET, other.block_hashes[:4]))
    with pytest.raises(StaleMessageError, match="4 of 5 blocks"):
        ring.control.pushes.begin(Push("more", TICKET, (*push.hashes, b"unknown")))
    assert ring.pages.account().pinned == 0

    for number in range(8):
        ring.control.pushes.begin(Push(f"push {number}", TICKET, push.hashes))
    with pytest.raises(CapacityError, match="limit is 8"):
        ring.control.pushes.begin(push)


def test_a_push_that_is_given_up_before_the_ranks_know_of_it_is_opened_and_closed_in_one_step() -> None:
    ring, push = cached()
    ring.control.pushes.begin(push)
    ring.control.close("push", abort=True)

    step = ring.control.plan(0.0)

    assert ([one.key for one in step.pushes], list(step.closes), list(step.aborts)) == (["push"], ["push"], ["push"])
