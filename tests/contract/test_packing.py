"""Scattered rows leave packed, land where they belong, and staging is taken again only when nothing reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from faulty_transport import FaultyTransport, freeze
from handoff_lab import LAYOUT, Memory, Rank, Reader, outcomes, reader, seal, until
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, Incarnation
from kvrelay.kernels.checksum import checksum_ranges
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.outcome import Failed, Settled
from kvrelay.kv_transfer.outgoing import Outgoing, Posting
from kvrelay.kv_transfer.packing import Packer, Slots
from kvrelay.kv_transfer.plan import Copies, Copy, CopyTable
from kvrelay.kv_transfer.transport import Transport, agent_name
from kvrelay.kv_transfer.values import ChecksumKind
from memory import region_of
from transport_party import KINDS, new_transport

PAGES = 40
SCATTERED = [31, 3, 25, 9, 17, 1, 38, 12]  # pages of a prompt of 60 tokens at its writer
PART_BYTES = 60 * LAYOUT.row_bytes


class Staged(Memory):
    """A pool with staging behind its pages: the last pages' worth of bytes are no pages."""

    def __init__(self, staging_bytes: int) -> None:
        super().__init__(PAGES)
        self.pool_bytes = len(self.mapping)
        whole = Memory(PAGES + -(-staging_bytes // LAYOUT.page_bytes_all_layers))
        self.mapping, self.view = whole.mapping, whole.view

    def gather(self, copies: CopyTable, offset_bytes: int) -> Callable[[], bool]:
        asked = 0

        def ready() -> bool:  # not at once, as on a device
            nonlocal asked, offset_bytes
            asked += 1
            if asked == 3:
                for copy in Copies(copies):
                    source = self.view[copy.src_offset_bytes : copy.src_offset_bytes + copy.num_bytes]
                    self.view[offset_bytes : offset_bytes + copy.num_bytes] = source
                    offset_bytes += copy.num_bytes
            return asked >= 3

        return ready


@contextmanager
def a_rank(kind: str, *, parts: int, wrap: Callable[[Transport], Transport] = lambda it: it) -> Iterator[Rank]:
    """A rank whose staging holds so many parts of 60 tokens."""
    staging_bytes = parts * -(-PART_BYTES // 256) * 256
    memory, writer = Staged(staging_bytes), Incarnation.new("prefill")

    def make(counters: Counters) -> Transport:
        return wrap(
            new_transport(
                kind, name=agent_name(writer, 0), pool=region_of(memory.mapping), pool_pages=PAGES,
                fences=FenceMemory.on_host(64), counters=counters,
            )
        )  # fmt: skip

    packer = Packer(memory.gather, offset_bytes=memory.pool_bytes, num_bytes=staging_bytes)
    thread = TransferThread(make, on_fatal=lambda: None, packer=packer)
    thread.start()
    rank = Rank(writer, 0, memory, thread)
    rank.fill(seed=4)
    yield rank
    thread.stop()


def landed_right(decode: Reader, rank: Rank) -> bool:
    tokens = LAYOUT.page_tokens
    return all(
        decode.memory.rows(layer, t // tokens, t % tokens)
        == rank.memory.rows(layer, SCATTERED[t // tokens], t % tokens)
        for layer in range(LAYOUT.num_layers)
        for t in range(60)
    )


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("kind", list(KINDS))
async def test_scattered_pages_leave_as_one_piece_per_part_and_land_where_they_belong(kind: str, parts: int) -> None:
    async with reader(kind) as decode:
        with a_rank(kind, parts=parts) as rank:
            end = rank.endpoint(decode.reserve("r", writer=rank.writer))
            running = asyncio.create_task(end.run())
            for layer in range(LAYOUT.num_layers):
                end.add_part(layer, Span(0, 60), SCATTERED)
            seal(end)

            assert await outcomes(running) == [Settled(3 * PART_BYTES)]

            values = rank.thread.counters.values
            assert values["parts_packed_total"] == values["pieces_posted_total"] == 3
            assert landed_right(decode, rank)


async def test_without_room_that_is_ours_to_wait_for_a_part_leaves_scattered() -> None:
    async with reader("loopback") as decode:
        with a_rank("loopback", parts=1, wrap=lambda it: FaultyTransport(it, freeze, from_write=0)) as stuck_rank:
            # The first hand-off's write never ends and holds all the staging.
            first = stuck_rank.endpoint(decode.reserve("a", writer=stuck_rank.writer))
            first_runs = asyncio.create_task(first.run())
            first.add_part(0, Span(0, 60), SCATTERED)
            await until(lambda: stuck_rank.thread.counters.values.get("parts_packed_total") == 1)

            second = stuck_rank.endpoint(decode.reserve("b", writer=stuck_rank.writer, first_page=20))
            second_runs = asyncio.create_task(second.run())
            second.add_part(0, Span(0, 60), SCATTERED)

            await until(lambda: stuck_rank.thread.counters.values.get("parts_posted_total") == 2)
            assert stuck_rank.thread.counters.values["parts_packed_total"] == 1
            assert stuck_rank.thread.counters.values["pieces_posted_total"] == 1 + len(SCATTERED)
            first.abort("over")
            second.abort("over")
            for outcome in await outcomes(first_runs, second_runs):
                assert isinstance(outcome, Failed)


async def test_a_hand_off_with_the_checksums_of_a_gpu_settles() -> None:
    async with reader("loopback") as decode:
        with a_rank("loopback", parts=2) as rank:
            for side in (decode.memory, rank.memory):
                by_words = replace(side.pool(), kind=ChecksumKind.WORDS, checksum=_words_of(side))
                side.pool = lambda made=by_words: made  # type: ignore[method-assign,misc]
            decode.hub._pool = decode.hub._sessions._pool = decode.memory.pool()
            end = rank.endpoint(decode.reserve("r", writer=rank.writer))
            running = asyncio.create_task(end.run())
            for layer in range(LAYOUT.num_layers):
                end.add_part(layer, Span(0, 60), SCATTERED)
            seal(end)

            assert await outcomes(running) == [Settled(3 * PART_BYTES)]
            assert landed_right(decode, rank)


def _words_of(side: Memory) -> Callable[[Sequence[tuple[int, int]]], int]:
    return lambda ranges: checksum_ranges(side.view, ranges)


def test_giving_up_drops_what_is_being_gathered_and_gives_its_staging_back() -> None:
    memory = Staged(PART_BYTES + 256)
    packer = Packer(memory.gather, offset_bytes=memory.pool_bytes, num_bytes=PART_BYTES + 256)
    copies = tuple(Copy(page * 1000, at * 500, 500) for at, page in enumerate((5, 3, 1, 7)))
    told: list[object] = []
    outgoing = Outgoing("peer", 0, 1, told.extend, packer=packer)
    counters, transport = Counters(), _Never()
    outgoing.add(Posting(copies, b"n"))
    busy = []
    outgoing.step(transport, counters)  # type: ignore[arg-type]
    busy.append(outgoing.busy)

    outgoing.stop_and_fence()
    outgoing.step(transport, counters)  # type: ignore[arg-type]
    busy.append(outgoing.busy)

    assert busy == [True, False]
    assert [type(event).__name__ for event in told] == ["Drained", "FenceDone"]
    assert packer._slots._taken == []


class _Never:
    """A transport that is asked for no write."""

    def scatters(self, peer: str) -> bool:
        return False


def test_only_what_becomes_much_fewer_pieces_is_packed() -> None:
    packer = Packer(lambda copies, offset: lambda: True, offset_bytes=10_000, num_bytes=1000)
    into_a_run = [Copy(src, at * 100, 100) for at, src in enumerate((900, 500, 700, 100))]

    assert packer.gains(into_a_run)
    assert not packer.gains(into_a_run[:3]), "few pieces are posted as fast as gathered"
    assert not packer.gains([replace(copy, dst_offset_bytes=3 * copy.dst_offset_bytes) for copy in into_a_run])
    assert not packer.gains([replace(copy, num_bytes=300) for copy in into_a_run]), "more than all the staging"
    packed = packer.start(into_a_run)
    assert packed is not None
    assert list(packed.copies) == [Copy(10_000, 0, 400)]


def test_a_slot_is_free_again_when_it_was_given_back_and_no_two_overlap() -> None:
    slots = Slots(1024, 2048)
    first, second, third = slots.take(600), slots.take(600), slots.take(500)
    assert (first, second, third) == (1024, 1024 + 768, 1024 + 1536)
    assert slots.take(100) is None
    slots.give_back(1024 + 768)
    assert slots.take(700) == 1024 + 768
    assert slots.take(1) is None
    slots.give_back(1024)
    assert slots.take(768) == 1024
