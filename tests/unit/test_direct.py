"""Direct writes around another transport: what goes which way, what lands in which order, when mappings are closed."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from host_direct import HostPool
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer import mapping
from kvrelay.kv_transfer.direct import DirectTransport
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.loopback import LoopbackTransport
from kvrelay.kv_transfer.mapping import Mapping
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import PENDING, Address, Done, Failed, Handle, Progress, digest
from memory import region_of

SIZE = 1 << 20
PIECES = [Copy(at * 2048, at * 4096, 1024) for at in range(8)]


class Side:
    """An agent over host memory, whose kernels end when they have been asked for three times."""

    def __init__(self, name: str) -> None:
        self.memory = mmap.mmap(-1, SIZE)
        self.pool = HostPool(region_of(self.memory))
        self.counters, self.fences = Counters(), FenceMemory.on_host(16, num_sources=16)
        self.other = LoopbackTransport(
            agent_name=name, pool=self.pool.region, pool_pages=1, fences=self.fences, counters=self.counters
        )
        self.transport = DirectTransport(self.other, self.pool, counters=self.counters)

    def fill(self, value: int) -> None:
        self.memory[:] = bytes([value]) * SIZE

    def has(self, copies: list[Copy], value: int) -> bool:
        return all(
            self.memory[copy.dst_offset_bytes : copy.dst_offset_bytes + copy.num_bytes]
            == bytes([value]) * copy.num_bytes
            for copy in copies
        )


@pytest.fixture
def writer() -> Iterator[Side]:
    side = Side("writer@1/0")
    side.fill(7)
    yield side
    side.transport.close()


@pytest.fixture
def reader(writer: Side) -> Iterator[Side]:
    side = Side("reader@1/0")
    writer.transport.connect(side.transport.address())
    yield side
    side.transport.close()


def ended(writer: Side, reader: Side | None, handle: Handle) -> Progress:
    until_s = time.monotonic() + 10.0
    while (progress := writer.transport.poll(handle)) is PENDING and time.monotonic() < until_s:
        if reader is not None:
            reader.transport.notices()
    writer.transport.release(handle)
    return progress


def test_scattered_pieces_go_directly_and_each_byte_is_counted_once(writer: Side, reader: Side) -> None:
    assert writer.transport.scatters("reader@1/0")
    assert ended(writer, reader, writer.transport.post("reader@1/0", PIECES, b"n")) == Done(8 * 1024)

    assert reader.has(PIECES, 7)
    assert sum(reader.memory[:]) == 7 * 8 * 1024
    counted = {"parts_direct_total": 1, "direct_bytes_total": 8 * 1024 - 16, "loopback_bytes_total": 16}
    assert writer.counters.values == counted


@pytest.mark.parametrize(
    "copies",
    [
        PIECES[:3],
        [*PIECES[:7], Copy(0, SIZE - 32, 24)],
        [*PIECES[:7], Copy(8, 0, 16)],
        [Copy(0, 0, 4 << 20)] * 4,
        [*PIECES, Copy(0, 16, 0)],
    ],
    ids=["few", "odd", "between two words", "large", "empty"],
)
def test_what_is_not_for_a_kernel_goes_the_other_way(writer: Side, reader: Side, copies: list[Copy]) -> None:
    writer.transport.post("reader@1/0", copies, b"n")

    assert not writer.pool.queue


def test_a_piece_outside_of_the_peers_pool_is_never_a_kernels(writer: Side, reader: Side) -> None:
    for outside in (Copy(0, SIZE - 16, 32), Copy(0, SIZE, 16), Copy(0, (1 << 63) - 16, 32)):
        writer.transport.post("reader@1/0", [*PIECES, outside], b"n")
        assert not writer.pool.queue


def test_the_notice_comes_when_the_kernel_has_ended(writer: Side, reader: Side) -> None:
    handle = writer.transport.post("reader@1/0", PIECES, b"n")
    for _ in range(2):
        assert writer.transport.poll(handle) is PENDING
        assert reader.transport.notices() == []
    assert not reader.has(PIECES, 7)

    assert ended(writer, reader, handle) == Done(8 * 1024)
    assert reader.has(PIECES, 7)


def test_a_fence_follows_every_kernel_before_it_also_when_nobody_polls_these(writer: Side, reader: Side) -> None:
    handles = [writer.transport.post("reader@1/0", PIECES, b"n%d" % at) for at in range(5)]
    assert len(writer.pool.queue) == 2, "all others wait, and leave together"
    fence = writer.transport.write_fence("reader@1/0", 5, 99)
    assert writer.transport.poll(fence) is PENDING
    assert reader.fences.cells.load(5) == 0

    assert isinstance(ended(writer, reader, fence), Done)
    assert reader.fences.cells.load(5) == 99
    assert reader.has(PIECES, 7)
    assert not writer.pool.queue
    assert [ended(writer, reader, handle) for handle in handles] == [Done(8 * 1024)] * 5


def test_a_fence_waits_for_no_kernel_of_another_peer(writer: Side, reader: Side) -> None:
    other = Side("other@1/0")
    writer.transport.connect(other.transport.address())
    writer.pool.hangs = True
    stuck = writer.transport.post("reader@1/0", PIECES, b"n")

    fence = writer.transport.write_fence("other@1/0", 5, 99)
    assert isinstance(ended(writer, other, fence), Done)
    assert writer.transport.poll(writer.transport.write_fence("reader@1/0", 5, 99)) is PENDING
    assert writer.transport.poll(stuck) is PENDING


def test_a_fence_still_waits_for_a_kernel_of_a_connection_that_was_given_up(writer: Side, reader: Side) -> None:
    writer.pool.hangs = True
    lost = writer.transport.post("reader@1/0", PIECES, b"n")
    writer.transport.disconnect("reader@1/0")
    writer.transport.connect(reader.transport.address())

    fence = writer.transport.write_fence("reader@1/0", 5, 99)
    for _ in range(5):
        assert writer.transport.poll(fence) is PENDING
    writer.pool.hangs = False
    assert isinstance(ended(writer, reader, fence), Done)
    assert reader.fences.cells.load(5) == 99
    assert ended(writer, reader, lost) == Done(8 * 1024)


def test_a_dead_peer_fails_its_own_writes_when_their_kernels_have_ended(writer: Side, reader: Side) -> None:
    other = Side("other@1/0")
    writer.transport.connect(other.transport.address())
    reader.transport.close()
    lost = writer.transport.post("reader@1/0", PIECES, b"n")
    kept = writer.transport.post("other@1/0", PIECES, b"n")
    assert writer.transport.poll(lost) is PENDING

    assert isinstance(ended(writer, None, lost), Failed)
    assert ended(writer, other, kept) == Done(8 * 1024)


def test_a_mapping_is_closed_when_no_kernel_writes_through_it_any_more(writer: Side, reader: Side) -> None:
    writer.pool.hangs = True
    handle = writer.transport.post("reader@1/0", PIECES, b"n")
    writer.transport.disconnect("reader@1/0")
    assert (writer.pool.opened, writer.pool.closed) == (1, 0)
    assert not writer.transport.scatters("reader@1/0")

    writer.pool.hangs = False
    assert isinstance(ended(writer, reader, handle), Failed)  # its notice has no way any more
    assert (writer.pool.opened, writer.pool.closed) == (1, 1)


def test_a_mapping_is_not_closed_while_parts_still_wait_for_their_kernel(writer: Side, reader: Side) -> None:
    writer.pool.hangs = True
    handles = [writer.transport.post("reader@1/0", PIECES, b"n%d" % at) for at in range(5)]
    assert len(writer.pool.queue) == 2
    writer.transport.disconnect("reader@1/0")

    writer.pool.hangs = False
    assert all(isinstance(ended(writer, reader, handle), Failed) for handle in handles)
    assert (writer.pool.opened, writer.pool.closed) == (1, 1)
    assert reader.has(PIECES[:7], 7)


def test_a_peers_next_life_takes_the_place_of_the_one_before(writer: Side, reader: Side) -> None:
    writer.transport.connect(reader.transport.address())
    assert (writer.pool.opened, writer.pool.closed) == (1, 0)
    again, neighbour = Side("reader@2/0"), Side("reader@1/1")

    writer.transport.connect(neighbour.transport.address())
    assert (writer.pool.opened, writer.pool.closed) == (2, 0)
    writer.transport.connect(again.transport.address())

    assert (writer.pool.opened, writer.pool.closed) == (3, 1)
    scatters = [writer.transport.scatters(peer) for peer in ("reader@1/0", "reader@1/1", "reader@2/0")]
    assert scatters == [False, True, True]


def offering(address: Address, blob: bytes) -> Address:
    return replace(address, mapping=blob, mapping_digest=digest(blob))


def test_a_peer_that_cannot_be_mapped_is_written_to_the_other_way_and_the_log_says_why_once(
    writer: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.kv_transfer.direct")
    peer = Side("reader@1/0")
    address = peer.transport.address()
    whole = address.mapping
    other_host = replace(Mapping.decode(whole), boot_id=bytes(16)).encode()
    gone = replace(Mapping.decode(whole), handle=(1 << 30).to_bytes(8, "little").ljust(64, b"\0")).encode()
    refused = {b"": "offers no mapping", b"\1" + whole[1:]: "version 2", whole[:-1]: "no mapping of version",
               other_host: "another host", gone: "no process"}  # fmt: skip

    for blob, why in refused.items():
        caplog.clear()
        for _ in range(2):
            writer.transport.connect(offering(address, blob))
        assert not writer.transport.scatters("reader@1/0")
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith("scattered pages go to reader@1/0 through loopback: ")
        assert why in line
        assert isinstance(ended(writer, peer, writer.transport.post("reader@1/0", PIECES, b"n")), Done)
        assert writer.transport.route("reader@1/0") == "sockets/lo"
    assert writer.pool.opened == 0

    monkeypatch.setattr(mapping, "boot_id", lambda: bytes(16))
    writer.transport.connect(offering(address, other_host))
    assert writer.transport.route("reader@1/0") == "cuda_ipc/direct or sockets/lo"


def test_a_damaged_mapping_is_refused(writer: Side) -> None:
    address = Side("reader@1/0").transport.address()

    with pytest.raises(InvalidRequestError, match="mapping of agent reader@1/0 does not match its digest"):
        writer.transport.connect(replace(address, mapping=address.mapping[::-1]))


def test_a_host_that_does_not_say_which_one_it_is_maps_nothing_and_is_not_mapped(
    reader: Side, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mapping, "_BOOT_ID", tmp_path / "nothing")
    mapping.boot_id.cache_clear()
    nameless = Side("nameless@1/0")

    assert nameless.transport.address().mapping == b""
    nameless.transport.connect(reader.transport.address())
    assert not nameless.transport.scatters("reader@1/0")


def test_an_agent_does_not_map_its_own_pool(writer: Side) -> None:
    writer.transport.connect(writer.transport.address())

    assert not writer.transport.scatters("writer@1/0")
