"""What goes wrong on the way is found before anything is admitted, and no page comes back too early."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

import faulty_transport
from faulty_transport import Fault, WithFault
from handoff_lab import LAYOUT, Reader, begin, hand_over, outcomes, relayed_bytes, ring, send_all, until
from idle import assert_self_idle
from kvrelay.core.errors import StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.kv_transfer.endpoint import Failed, Settled
from kvrelay.kv_transfer.values import FenceProof, Request
from kvrelay.kv_transfer.wire import proof_to_pb
from kvrelay.proto.v1 import decode_pb2


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (faulty_transport.truncate, "parts_corrupt_total"),
        (faulty_transport.misplace, "parts_corrupt_total"),
        (faulty_transport.overtake, "parts_corrupt_total"),
    ],
)
async def test_bytes_that_are_not_the_ones_sent_are_never_admitted(
    kind: str, decode: Reader, fault: Fault, counter: str
) -> None:
    with ring(kind, wrap=WithFault(fault)) as [rank]:
        _, running = hand_over(decode, rank)

        [failed] = await outcomes(running)
        await until(lambda: decode.freed)

    assert isinstance(failed, Failed)
    assert "do not match their checksum" in failed.reason
    assert decode.admitted == []
    assert decode.thread.counters.values[counter] >= 1


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (faulty_transport.drop, "parts_verified_total"),
        (faulty_transport.garble, "notices_garbled_total"),
        (faulty_transport.mislabel, "notices_stale_total"),
        (faulty_transport.claim_other_rank, "notices_stale_total"),
    ],
)
async def test_a_part_that_is_not_announced_is_missed_soon_after_its_writes_have_ended(
    kind: str, decode: Reader, fault: Fault, counter: str
) -> None:
    with ring(kind, wrap=WithFault(fault)) as [rank]:
        _, running = hand_over(decode, rank, timeout_s=20.0)

        [failed] = await outcomes(running)
        await until(lambda: decode.freed)

    assert isinstance(failed, Failed)
    assert "never landed" in failed.reason
    assert decode.admitted == []
    assert decode.thread.counters.values[counter] >= 1


async def test_parts_that_wait_to_be_verified_are_not_missed(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        end = rank.endpoint(decode.reserve("r", writer=rank.writer))
        decode.memory.delays_s.append(3.0)  # longer than a part that was lost is waited for
        running = asyncio.create_task(end.run())
        send_all(end)

        [settled] = await outcomes(running)

    assert isinstance(settled, Settled)


async def test_a_part_written_twice_is_admitted_once(kind: str, decode: Reader) -> None:
    with ring(kind, wrap=WithFault(faulty_transport.repeat)) as [rank]:
        _, running = hand_over(decode, rank)

        assert await outcomes(running) == [Settled(relayed_bytes(60))]
        [admitted] = decode.admitted
    assert admitted.relayed_bytes == relayed_bytes(60)


async def test_one_write_that_cannot_be_posted_fails_the_whole_at_once(kind: str, decode: Reader) -> None:
    with ring(kind, wrap=WithFault(faulty_transport.refuse)) as [rank]:
        end, running = begin(decode, rank)
        start_s = time.monotonic()
        send_all(end)

        assert await outcomes(running) == [Failed("no such route")]
        await until(lambda: decode.freed)
        await end.sources_free

    assert time.monotonic() - start_s < 5.0  # its time is 10 s
    assert [reason for _, _, reason in decode.failed] == ["rank 0 gave up: no such route"]


async def test_a_writer_whose_peer_does_nothing_is_stuck_in_bounded_time_and_its_pages_stay_away(
    kind: str, decode: Reader
) -> None:
    with ring(kind, wrap=WithFault(faulty_transport.freeze)) as [rank]:
        end, running = begin(decode, rank)
        for layer in range(LAYOUT.num_layers):
            end.add_part(layer, Span(0, 60), range(8))
        await until(lambda: decode.thread.counters.values.get("parts_verified_total") == 2)

        decode.hub.abort(Request("r", 1), "client went away")
        [failed] = await outcomes(running)

        assert failed == Failed("decode gave up: client went away; no fence within 1 s", stuck=True)
        assert not end.sources_free.done()
        await until(lambda: decode.hub.stats().quarantined_pages == 8)
        assert decode.freed == []
        assert decode.hub.stats().oldest_quarantine_s >= 0
    await asyncio.sleep(0.1)
    assert decode.freed == []


async def test_a_fence_that_comes_after_its_stream_has_ended_frees_the_pages_all_the_same(
    kind: str, decode: Reader
) -> None:
    faulty = WithFault(faulty_transport.freeze)
    with ring(kind, wrap=faulty) as [rank]:
        end, running = begin(decode, rank)
        for layer in range(LAYOUT.num_layers):
            end.add_part(layer, Span(0, 60), range(8))
        await until(lambda: decode.thread.counters.values.get("parts_verified_total") == 2)
        decode.hub.abort(Request("r", 1), "client went away")
        [failed] = await outcomes(running)
        assert isinstance(failed, Failed)
        assert failed.stuck
        await until(lambda: decode.hub.stats().quarantined_pages == 8)

        faulty.made[0].thaw()
        await until(lambda: decode.freed)
        await end.sources_free
        assert decode.hub.stats().quarantined_pages == 0


async def test_pages_come_back_when_the_link_that_no_fence_could_cross_has_ended(kind: str, decode: Reader) -> None:
    faulty = WithFault(faulty_transport.break_link)
    with ring(kind, wrap=faulty) as [rank]:
        _, running = hand_over(decode, rank)
        [failed] = await outcomes(running)
        assert isinstance(failed, Failed)
        assert "no fence" in failed.reason
        assert decode.freed == []  # some of it may still be on its way

        await until(lambda: decode.freed)
        faulty.made[0].heal()
        again = rank.endpoint(decode.reserve("s", writer=rank.writer))
        running = asyncio.create_task(again.run())
        send_all(again)
        assert isinstance((await outcomes(running))[0], Settled)  # over a new link

    assert decode.hub.counters.values["fences_link_closed_total"] == 1
    assert decode.hub.stats().quarantined_pages == 0


async def test_pages_come_back_when_the_answer_to_an_attach_was_lost(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        decode.loses_answers = True
        _, running = hand_over(decode, rank)

        [failed] = await outcomes(running)
        await until(lambda: decode.freed)

    assert isinstance(failed, Failed)
    assert decode.hub.counters.values["fences_nothing_posted_total"] == 1
    assert decode.thread.counters.values.get("parts_verified_total", 0) == 0


async def test_a_fence_that_overtakes_its_hello_closes_the_epoch_to_it(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        end = rank.endpoint(decode.reserve("r", writer=rank.writer))
        said = decode_pb2.FencedRequest(rank=end._stream.hello, fenced=proof_to_pb(FenceProof.NOTHING_POSTED))
        decode.hub.fenced(said)
        await until(lambda: decode.freed)

        [failed] = await outcomes(asyncio.create_task(end.run()))

    assert isinstance(failed, Failed)
    assert "gave up before it was let in" in failed.reason


async def test_a_stream_that_was_not_let_in_does_not_speak_for_the_one_that_was(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=rank.writer)
        first, second = rank.endpoint(ticket), rank.endpoint(ticket)
        running = asyncio.create_task(first.run())
        await until(lambda: decode.hub.stats().sessions["attached"] == 1)
        said = decode_pb2.FencedRequest(rank=second._stream.hello, fenced=proof_to_pb(FenceProof.NOTHING_POSTED))
        with pytest.raises(StaleMessageError, match="another stream"):
            decode.hub.fenced(said)
        send_all(first)
        assert isinstance((await outcomes(running))[0], Settled)


async def test_a_late_fence_by_a_stranger_is_refused_and_one_that_nobody_waits_for_is_ignored(
    kind: str, decode: Reader
) -> None:
    with ring(kind) as [rank]:
        ticket = decode.reserve("r", writer=rank.writer)
        end = rank.endpoint(ticket)
        running = asyncio.create_task(end.run())
        await until(lambda: decode.hub.stats().sessions["attached"] == 1)
        said = decode_pb2.FencedRequest(rank=end._stream.hello, fenced=proof_to_pb(FenceProof.HANDLES_DONE))
        other = decode_pb2.FencedRequest.FromString(said.SerializeToString())
        other.rank.one_time_token = bytes(16)
        with pytest.raises(StaleMessageError):
            decode.hub.fenced(other)
        assert decode.hub.stats().sessions["attached"] == 1
        end.abort("enough")
        await outcomes(running)
        await until(lambda: decode.freed)
        decode.hub.fenced(said)


async def test_a_node_that_waits_for_work_does_nothing(kind: str, decode: Reader) -> None:
    with ring(kind, ring_size=2) as ranks:
        end = ranks[0].endpoint(decode.reserve("r", writer=ranks[0].writer))
        running = asyncio.create_task(end.run())
        send_all(end)
        await outcomes(running)
        decode.hub.released(decode.admitted[0].epoch)
        await until(lambda: decode.freed)

        await assert_self_idle(os.getpid(), 0.02)
