"""Scattered pages of one process are written by a kernel straight into the pool of another, on one GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from direct_reader import HELD_UP_CYCLES, LAYOUT, PAGES, Reader, Side, digest, first_rows, hold_up
from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.mapping import Mapping
from kvrelay.kv_transfer.outgoing import Outgoing, Posting
from kvrelay.kv_transfer.plan import Copies, Copy
from kvrelay.kv_transfer.transport import PENDING, Done, Failed, Handle, Progress

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def writer() -> Side:
    return Side("writer@1/0", seed=1)


@pytest.fixture(scope="module")
def pair(writer: Side) -> Iterator[tuple[Side, Reader, Tensor]]:
    """A writer, a reader, and what the reader's pool is to hold."""
    reader = Reader("reader@1/0", seed=2)
    writer.transport.connect(reader.address)
    yield writer, reader, first_rows(2)
    reader.kill()


def scattered(seed: int, *, pages: int = 60, first: int = 0, among: int = PAGES * LAYOUT.num_layers) -> Copies:
    """Return copies of pages to pages of any layer and place, or `among` the first ones, the last one cut short.

    Of one seed, those from different `first` have no page in common.
    """
    generator = torch.Generator().manual_seed(seed)
    sources, targets = (torch.randperm(among, generator=generator)[first:] for _ in range(2))
    size = LAYOUT.page_bytes
    sizes = torch.full((pages,), size)
    sizes[-1] = 10 * LAYOUT.row_bytes
    return Copies(torch.stack((sources[:pages] * size, targets[:pages] * size, sizes), dim=1).numpy())


def apply(expected: Tensor, copies: Sequence[Copy], source: Tensor) -> None:
    for copy in copies:
        piece = source[copy.src_offset_bytes : copy.src_offset_bytes + copy.num_bytes]
        expected[copy.dst_offset_bytes : copy.dst_offset_bytes + copy.num_bytes] = piece


def ended(side: Side, handle: Handle, *, within_s: float = 20.0) -> Progress:
    until_s = time.monotonic() + within_s
    while (progress := side.transport.poll(handle)) is PENDING and time.monotonic() < until_s:
        pass
    assert progress is not PENDING, "it did not end in time"
    side.transport.release(handle)
    return progress


def test_scattered_pages_have_all_landed_when_the_notice_comes_and_nothing_else_has_changed(
    pair: tuple[Side, Reader, Tensor],
) -> None:
    writer, reader, expected = pair
    assert writer.transport.scatters("reader@1/0")
    total = 0
    for seed in range(5):
        copies = scattered(seed, pages=10 + 100 * seed)
        apply(expected, copies, first_rows(1))

        handle = writer.transport.post("reader@1/0", copies, b"part %d" % seed)
        assert ended(writer, handle) == Done(int(copies.table[:, 2].sum()))
        total += int(copies.table[:, 2].sum())

        assert reader.ask("seen", b"part %d" % seed, 10.0) == digest(expected)
    assert digest(writer.rows()) == digest(first_rows(1))
    assert writer.transport.route("reader@1/0").startswith("cuda_ipc/direct or cuda_ipc/cuda")
    counted = writer.counters.values
    assert counted["nixl_bytes_total"] == 5 * 16
    assert counted["direct_bytes_total"] + 5 * 16 == total


def test_a_fence_waits_for_kernels_that_still_write_and_neither_posting_nor_it_waits_for_the_device(
    pair: tuple[Side, Reader, Tensor],
) -> None:
    writer, reader, expected = pair
    before, copies = digest(expected), scattered(11)
    over = hold_up(writer)
    begin_s = time.monotonic()
    data = [writer.transport.post("reader@1/0", copies, b"late %d" % at) for at in range(3)]
    fence = writer.transport.write_fence("reader@1/0", 3, 4711)
    while time.monotonic() < begin_s + 0.1:
        assert writer.transport.poll(fence) is PENDING
    assert not over.query(), "posting waited for the device"  # type: ignore[no-untyped-call]
    assert reader.ask("cell", 3) == 0
    assert reader.ask("now") == before

    apply(expected, copies, first_rows(1))
    assert isinstance(ended(writer, fence), Done)
    assert reader.ask("cell", 3) == 4711
    assert reader.ask("now") == digest(expected)
    assert all(isinstance(ended(writer, handle), Done) for handle in data)


def test_a_writer_packs_nothing_for_a_peer_that_it_reaches_directly(pair: tuple[Side, Reader, Tensor]) -> None:
    writer, reader, expected = pair
    told: list[object] = []
    outgoing = Outgoing("reader@1/0", 0, 1, told.extend, packer=_NeverPacks())  # type: ignore[arg-type]
    layer_0 = [scattered(20, pages=40, first=40 * at, among=PAGES) for at in range(4)]
    slab = LAYOUT.page_bytes * PAGES
    steps = [torch.tensor((layer * slab, (2 - layer) * slab, 0)).numpy() for layer in range(3)]
    parts = [Copies(copies.table + step) for step in steps for copies in layer_0]
    for number, copies in enumerate(parts):
        outgoing.add(Posting(copies, b"of a writer %d" % number))
        apply(expected, copies, first_rows(1))
    outgoing.finish()
    counters, until_s = Counters(), time.monotonic() + 20

    while (outgoing.busy or not told) and time.monotonic() < until_s:
        outgoing.step(writer.transport, counters)

    assert [type(event).__name__ for event in told] == ["Drained"]
    assert all(reader.ask("seen", b"of a writer %d" % number, 10.0) for number in range(12))
    assert reader.ask("now") == digest(expected)


class _NeverPacks:
    def gains(self, copies: Sequence[Copy]) -> bool:
        raise AssertionError("asked whether to pack")


def test_a_killed_reader_fails_its_own_writes_alone_and_its_next_life_is_mapped_anew(
    pair: tuple[Side, Reader, Tensor],
) -> None:
    writer, reader, expected = pair
    mortal, again = Reader("mortal@1/0", seed=3), Reader("mortal@2/0", seed=4)
    writer.transport.connect(mortal.address)
    copies = scattered(31)
    assert isinstance(ended(writer, writer.transport.post("mortal@1/0", copies, b"before")), Done)

    hold_up(writer)
    lost = [writer.transport.post("mortal@1/0", copies, b"lost %d" % at) for at in range(2)]
    kept = writer.transport.post("reader@1/0", copies, b"kept")
    mortal.kill()
    apply(expected, copies, first_rows(1))
    outcomes = [ended(writer, handle) for handle in lost]
    assert isinstance(ended(writer, kept), Done)
    assert all(isinstance(outcome, Failed) for outcome in outcomes), outcomes
    assert reader.ask("seen", b"kept", 10.0) == digest(expected)
    torch.cuda.synchronize()  # the device still works

    anew = first_rows(4)
    apply(anew, copies, first_rows(1))
    writer.transport.connect(again.address)
    assert not writer.transport.scatters("mortal@1/0")
    assert writer.transport._leaving == []
    assert isinstance(ended(writer, writer.transport.post("mortal@2/0", copies, b"anew")), Done)
    assert reader.ask("now") == digest(expected)
    assert again.ask("seen", b"anew", 10.0) == digest(anew)
    again.kill()


@pytest.mark.parametrize(("offset_bytes", "num_bytes"), [(8, 16), (0, 1 << 40), (1 << 40, 16)])
def test_a_pool_that_does_not_lie_in_what_was_mapped_is_refused(
    pair: tuple[Side, Reader, Tensor], offset_bytes: int, num_bytes: int
) -> None:
    writer, reader, _ = pair

    with pytest.raises(TransferError, match="are no pool in the"):
        writer.direct.open(Mapping.decode(reader.address.mapping).handle, offset_bytes, num_bytes)


def test_a_second_after_its_death_no_kernel_of_a_writer_writes_any_more(writer: Side) -> None:
    other = Reader("other@1/0", seed=5)
    assert other.address.pool_pages == PAGES
    before = digest(writer.rows())
    assert other.ask("write late", writer.transport.address(), scattered(51).table)
    other.kill()
    assert digest(writer.rows()) == before, "it was not held up"

    time.sleep(1.0)
    then = digest(writer.rows())
    time.sleep(1.0)
    assert digest(writer.rows()) == then


def test_a_peer_is_forgotten_while_a_kernel_still_writes_into_its_pool(pair: tuple[Side, Reader, Tensor]) -> None:
    writer, reader, expected = pair
    copies = scattered(41)
    over = hold_up(writer)
    handle = writer.transport.post("reader@1/0", copies, b"nobody hears this")
    writer.transport.disconnect("reader@1/0")
    assert len(writer.transport._leaving) == 1
    assert not over.query(), "forgetting waited for the device"  # type: ignore[no-untyped-call]

    torch.cuda._sleep(3 * HELD_UP_CYCLES)  # type: ignore[no-untyped-call]
    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    assert isinstance(ended(writer, handle), Failed)
    assert writer.transport._leaving == []
    assert not computed.query(), "closing a mapping waited for the model"  # type: ignore[no-untyped-call]
    apply(expected, copies, first_rows(1))
    last = copies[-1].dst_offset_bytes + copies[-1].num_bytes
    expected[last - 16 : last] = torch.tensor(reader_bytes(reader, last), dtype=torch.uint8)
    assert reader.ask("now") == digest(expected)


def reader_bytes(reader: Reader, end: int) -> list[int]:
    """The last bytes of the part are the other transport's, which had forgotten the peer."""
    found: list[int] = reader.ask("bytes", end - 16, end)
    return found
