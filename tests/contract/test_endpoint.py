"""A whole hand-off over real gRPC and a real transport: what arrives, when it leaves, and what is counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from handoff_lab import (
    LAYOUT,
    Reader,
    begin,
    hand_over,
    outcomes,
    reader,
    relayed_bytes,
    ring,
    same_rows,
    seal,
    send_all,
    until,
)
from kvrelay.core.shard import Span
from kvrelay.kv_transfer.endpoint import Failed, Settled
from kvrelay.kv_transfer.local import DeviceSums


@pytest.mark.parametrize("ring_size", [1, 2, 3])
async def test_what_every_rank_wrote_is_there_when_the_request_is_admitted(
    kind: str, decode: Reader, ring_size: int
) -> None:
    with ring(kind, ring_size=ring_size) as ranks:
        ticket = decode.reserve("r", writer=ranks[0].writer, ring_size=ring_size, first_page=5)
        ends = [rank.endpoint(ticket) for rank in ranks]
        running = [asyncio.create_task(end.run()) for end in ends]
        for rank, end in enumerate(ends):
            send_all(end, ring_size=ring_size, rank=rank)

        [admitted] = await until(lambda: decode.admitted)

        assert same_rows(decode, ranks[0], Span(0, 60), first_page=5)
        settled = await outcomes(*running)
        assert sum(end.relayed_bytes for end in settled if isinstance(end, Settled)) == relayed_bytes(60)
    assert (admitted.first_token.token_id, admitted.cached_tokens) == (42, 7)
    assert admitted.relayed_bytes == relayed_bytes(60)
    assert admitted.exposed_relay_ms >= 0
    assert admitted.verify_ms >= 0


async def test_pages_come_back_once_the_scheduler_lets_go_and_every_rank_is_fenced(kind: str, decode: Reader) -> None:
    with ring(kind, ring_size=2) as ranks:
        ticket = decode.reserve("r", writer=ranks[0].writer, ring_size=2, first_page=3)
        ends = [rank.endpoint(ticket) for rank in ranks]
        running = [asyncio.create_task(end.run()) for end in ends]
        for rank, end in enumerate(ends):
            send_all(end, ring_size=2, rank=rank)
        await outcomes(*running)
        [admitted] = decode.admitted
        assert decode.freed == []

        decode.hub.released(admitted.epoch)
        await until(lambda: decode.freed)

    assert decode.freed == [(admitted.epoch, tuple(range(3, 11)))]
    assert decode.hub.stats().sessions == {}
    assert decode.hub.counters.values["fences_handles_done_total"] == 2


@pytest.mark.parametrize(
    ("decodes", "prefills", "is_woken"),
    [(b"", b"", True), (b"gpu a", b"gpu b", True), (b"gpu a", b"", True), (b"gpu a", b"gpu a", False)],
)
async def test_a_device_is_kept_awake_while_latents_come_unless_prefill_computes_on_it(
    kind: str, decodes: bytes, prefills: bytes, is_woken: bool
) -> None:
    async with reader(kind, device=decodes) as decode:
        with ring(kind) as [rank]:
            rank.memory.device = prefills
            endpoint, running = begin(decode, rank)
            endpoint.add_part(0, Span(0, 60), range(LAYOUT.pages_for(60)))
            await until(lambda: decode.thread.counters.values.get("parts_verified_total"))
            await asyncio.sleep(0.05)  # until the event loop has been told
            assert (decode.num_landed > 0) == is_woken
            for layer in range(1, LAYOUT.num_layers):
                endpoint.add_part(layer, Span(0, 60), range(LAYOUT.pages_for(60)))
            seal(endpoint, rank=0)
            await outcomes(running)
            assert decode.num_landed == 0 or is_woken


async def test_only_tokens_that_are_not_resident_travel(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        _, running = hand_over(decode, rank, resident_tokens=40)

        assert await outcomes(running) == [Settled(relayed_bytes(20))]

        assert same_rows(decode, rank, Span(40, 60))
        assert not any(decode.memory.rows(0, 0, 0))


async def test_a_hand_off_of_no_bytes_still_needs_every_rank(kind: str, decode: Reader) -> None:
    with ring(kind, ring_size=2) as ranks:
        ticket = decode.reserve("r", writer=ranks[0].writer, ring_size=2, resident_tokens=60)
        ends = [rank.endpoint(ticket) for rank in ranks]
        first = asyncio.create_task(ends[0].run())
        seal(ends[0], rank=0)
        await asyncio.sleep(0.2)
        assert decode.admitted == []

        second = asyncio.create_task(ends[1].run())
        seal(ends[1], rank=1)

        assert await outcomes(first, second) == [Settled(0), Settled(0)]
        [admitted] = decode.admitted
        assert admitted.relayed_bytes == 0


async def test_bytes_that_landed_before_the_seal_are_counted_as_early(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        end, running = begin(decode, rank)
        for layer in range(LAYOUT.num_layers):
            end.add_part(layer, Span(0, 60), range(8))
        await until(lambda: decode.thread.counters.values.get("parts_verified_total") == LAYOUT.num_layers)
        await asyncio.sleep(0.05)

        seal(end)

        await outcomes(running)
        [admitted] = decode.admitted
        assert admitted.early_bytes == admitted.relayed_bytes == relayed_bytes(60)
        assert admitted.exposed_relay_ms == 0


async def test_the_transport_counts_the_bytes_of_the_manifest(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank]:
        end, running = hand_over(decode, rank)
        [settled] = await outcomes(running)
        await end.sources_free

        assert isinstance(settled, Settled)
        assert rank.thread.counters.values[f"{kind}_bytes_total"] == settled.relayed_bytes


async def test_a_part_leaves_only_when_the_work_behind_its_rows_has_ended(kind: str, decode: Reader) -> None:
    with ring(kind) as [rank], ThreadPoolExecutor(max_workers=1) as waiter:
        rank.fill(seed=1)
        computed = threading.Event()

        def start(ranges: Sequence[tuple[int, int]]) -> Callable[[], int]:
            def finish() -> int:
                assert computed.wait(10)
                rank.fill(seed=2)  # what the kernels write at last
                return rank.memory.pool().checksum(ranges)

            return finish

        end = rank.endpoint(decode.reserve("r", writer=rank.writer))
        end._pool = replace(end._pool, device_sums=DeviceSums(start, waiter))
        running = asyncio.create_task(end.run())
        send_all(end)
        await asyncio.sleep(0.2)
        posted_early = rank.thread.counters.values.get("parts_posted_total", 0)
        computed.set()

        assert await outcomes(running) == [Settled(relayed_bytes(60))]
        assert posted_early == 0
        assert same_rows(decode, rank, Span(0, 60))


async def test_a_checksum_that_fails_ends_the_hand_off(kind: str, decode: Reader) -> None:
    def start(_: Sequence[tuple[int, int]]) -> Callable[[], int]:
        def finish() -> int:
            raise RuntimeError("the device is lost")

        return finish

    with ring(kind) as [rank], ThreadPoolExecutor(max_workers=1) as waiter:
        end = rank.endpoint(decode.reserve("r", writer=rank.writer))
        end._pool = replace(end._pool, device_sums=DeviceSums(start, waiter))
        running = asyncio.create_task(end.run())
        send_all(end)

        [outcome] = await outcomes(running)

        assert isinstance(outcome, Failed)
        assert "the device is lost" in outcome.reason
