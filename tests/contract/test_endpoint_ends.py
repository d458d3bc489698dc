"""How a hand-off over real gRPC and a real transport ends early: aborts, refusals, leases, and what then comes back."""

from __future__ import annotations

import asyncio

import pytest

from handoff_lab import Reader, begin, hand_over, outcomes, relayed_bytes, ring, send_all, until
from kvrelay.core.errors import StaleMessageError, UnavailableError
from kvrelay.core.shard import Span
from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.endpoint import Failed, Settled
from kvrelay.kv_transfer.values import Request


async def test_an_abort_by_decode_reaches_the_writer_and_frees_the_pages(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        end, running = begin(decode, rank)
        end.add_part(0, Span(0, 60), range(8))
        await until(lambda: decode.thread.counters.values.get("parts_verified_total"))

        assert decode.hub.abort(Request("r", 1), "client went away")

        assert await outcomes(running) == [Failed("decode gave up: client went away")]
        await until(lambda: decode.freed)
        await end.sources_free
        assert not decode.hub.abort(Request("r", 1), "again")
    assert [reason for _, _, reason in decode.failed] == ["client went away"]
    assert len(decode.freed) == 1


async def test_an_abort_by_a_rank_ends_all_ranks(kind: str, decode: Reader) -> None:
    with ring(kind, ring_size=2) as ranks:
        ticket = decode.reserve("r", writer=ranks[0].writer, ring_size=2)
        ends = [rank.endpoint(ticket) for rank in ranks]
        running = [asyncio.create_task(end.run()) for end in ends]
        ends[0].add_part(0, Span(0, 30), range(8))
        ends[1].add_part(0, Span(30, 60), range(8))
        await until(lambda: decode.thread.counters.values.get("parts_verified_total") == 2)

        ends[1].abort("the ring left")

        assert await outcomes(*running) == [
            Failed("decode gave up: rank 1 gave up: the ring left"),
            Failed("the ring left"),
        ]
        await until(lambda: decode.freed)


async def test_a_reservation_nobody_attached_to_is_freed_at_once(decode: Reader) -> None:
    decode.reserve("r", writer=Incarnation.new("prefill"))

    assert decode.hub.abort(Request("r", 1), "no prefill node")

    assert len(decode.freed) == 1


async def test_an_epoch_that_is_over_refuses_attach(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=rank.writer)
        decode.hub.abort(Request("r", 1), "router died")
        end = rank.endpoint(ticket)
        end.add_part(0, Span(0, 60), range(8))

        [failed] = await outcomes(asyncio.create_task(end.run()))

        assert isinstance(failed, Failed)
        assert "router died" in failed.reason
        assert end.sources_free.done()
        assert not any(decode.memory.view)
        assert decode.hub.counters.values["attaches_refused_total"] == 1


async def test_a_rank_attaches_once(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=rank.writer)
        first, second = rank.endpoint(ticket), rank.endpoint(ticket)
        running = asyncio.create_task(first.run())
        await until(lambda: decode.hub.stats().sessions == {"attached": 1})

        [failed] = await outcomes(asyncio.create_task(second.run()))

        assert isinstance(failed, Failed)
        assert "rank 0 has used its token" in failed.reason
        send_all(first)
        assert await outcomes(running) == [Settled(relayed_bytes(60))]


async def test_a_wrong_token_is_refused(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=rank.writer)
        ticket.one_time_token = b"guessed"

        [failed] = await outcomes(asyncio.create_task(rank.endpoint(ticket).run()))

        assert isinstance(failed, Failed)
        assert "wrong token" in failed.reason


async def test_a_ticket_with_other_pages_than_the_reserved_ones_lets_nobody_in(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=rank.writer)
        ticket.pages[0].first_page += 1

        [failed] = await outcomes(asyncio.create_task(rank.endpoint(ticket).run()))

        assert isinstance(failed, Failed)
        assert "does not name what epoch" in failed.reason


async def test_a_ticket_with_another_fence_cell_lets_nobody_in(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=rank.writer)
        ticket.fence_slot += 1

        [failed] = await outcomes(asyncio.create_task(rank.endpoint(ticket).run()))

        assert isinstance(failed, Failed)
        assert "does not name what epoch" in failed.reason


async def test_a_ticket_for_another_writer_is_refused_before_it_is_used(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=Incarnation.new("somebody else"))

        with pytest.raises(StaleMessageError, match="somebody else"):
            rank.endpoint(ticket)


async def test_a_reservation_nobody_renews_ends_without_traffic(decode: Reader) -> None:
    decode.reserve("r", writer=Incarnation.new("prefill"), lease_s=0.2)

    await until(lambda: decode.freed)

    assert [reason for _, _, reason in decode.failed] == ["the holder's lease has run out"]
    assert decode.hub.renew(["r"]) == ["r"]


async def test_a_renewed_reservation_lives_until_its_deadline(decode: Reader) -> None:
    decode.reserve("r", writer=Incarnation.new("prefill"), lease_s=1.0, timeout_s=2.0)

    for _ in range(15):
        assert decode.hub.renew(["r", "unknown"]) == ["unknown"]
        await asyncio.sleep(0.1)
        assert decode.freed == []
    await until(lambda: decode.failed or decode.hub.renew(["r"]))

    assert [reason for _, _, reason in decode.failed] == ["the hand-off's time is over"]


async def test_a_later_attempt_takes_over_and_an_earlier_one_is_stale(decode: Reader) -> None:
    writer = Incarnation.new("prefill")
    decode.reserve("r", writer=writer, attempt=2, first_page=0)

    decode.reserve("r", writer=writer, attempt=3, first_page=20)

    assert [reason for _, _, reason in decode.failed] == ["superseded by attempt 3"]
    assert [pages[0] for _, pages in decode.freed] == [0]
    with pytest.raises(StaleMessageError, match="attempt 2"):
        decode.reserve("r", writer=writer, attempt=2)
    assert not decode.hub.abort(Request("r", 2), "late")
    assert decode.hub.stats().sessions == {"reserved": 1}


async def test_a_writer_known_to_be_gone_gets_no_ticket(decode: Reader) -> None:
    writer = Incarnation.new("prefill")
    decode.hub.writer_dead(writer, "reaped")

    with pytest.raises(UnavailableError, match="reaped"):
        decode.reserve("r", writer=writer)


async def test_a_writer_that_vanishes_is_quarantined_until_it_is_known_dead(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        end, running = begin(decode, rank)
        end.add_part(0, Span(0, 60), range(8))
        await until(lambda: decode.thread.counters.values.get("parts_verified_total"))
        running.cancel()  # the stream breaks and no fence will ever come
        await until(lambda: decode.failed)
        assert "rank 0 went away" in decode.failed[0][2]
        assert decode.freed == []

        await until(lambda: decode.hub.stats().quarantined_pages == 8)
        decode.hub.writer_dead(rank.writer, "reaped by its supervisor")
        assert decode.freed == []  # what it sent may still be in our sockets
        await until(lambda: decode.freed)

    assert decode.hub.stats().quarantined_pages == 0
    assert decode.hub.counters.values["fences_known_dead_total"] == 1


async def test_an_abort_while_admitted_waits_for_the_scheduler(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        _, running = hand_over(decode, rank)
        await outcomes(running)
        [admitted] = decode.admitted

        assert decode.hub.abort(Request("r", 1), "client went away")
        assert [reason for _, _, reason in decode.failed] == ["client went away"]
        assert decode.freed == []
        decode.hub.released(admitted.epoch)

        await until(lambda: decode.freed)
        with pytest.raises(StaleMessageError):
            decode.hub.released(admitted.epoch)
