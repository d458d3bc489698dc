"""One suite for every transport, between real processes: what the hand-off relies on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from transport_party import DIRECT_KINDS, KINDS, Party, PartyError

MIB = 1 << 20
NewParty = Callable[[str], Party]
Pair = tuple[Party, Party]


@pytest.fixture(scope="module", params=list(KINDS | DIRECT_KINDS))
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def parties_of(transport: str) -> Iterator[NewParty]:
    parties: list[Party] = []

    def make(name: str) -> Party:
        parties.append(Party(transport, name))
        return parties[-1]

    try:
        yield make
    finally:
        for party in parties:
            party.kill()


def connected(new_party: NewParty) -> Pair:
    writer, reader = new_party("writer"), new_party("reader")
    writer.connect(**reader.address())
    return writer, reader


@pytest.fixture
def new_party(transport: str) -> Iterator[NewParty]:
    with parties_of(transport) as new_party:
        yield new_party


@pytest.fixture
def new_pair(new_party: NewParty) -> Pair:
    """Two processes that have done nothing yet, for tests that end one of them or count from the start."""
    return connected(new_party)


@pytest.fixture(scope="module")
def _lasting_pair(transport: str) -> Iterator[Pair]:
    with parties_of(transport) as new_party:
        yield connected(new_party)


@pytest.fixture
def pair(_lasting_pair: Pair) -> Iterator[Pair]:
    """Two processes that other tests use as well, with nothing in their pools."""
    writer, reader = _lasting_pair
    for party in _lasting_pair:
        party.begin_anew()
    yield writer, reader
    wait_for(lambda: len(reader.notices()) == writer.posted())  # or the next test would hear of them


def wait_for(question: Callable[[], Any], *, within_s: float = 20.0) -> Any:
    """Return the first true answer."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        answer = question()
        if answer:
            return answer
        time.sleep(0.002)
    raise AssertionError("it did not happen in time")


def outcome(party: Party, handle: int, *, within_s: float = 20.0) -> Any:
    """Return how a write ended, as a list: Done and its bytes, or Failed and why."""

    def ended() -> Any:
        progress = party.progress(handle)
        return progress if progress[0] != "Pending" else None

    return wait_for(ended, within_s=within_s)


def test_when_the_notice_is_in_all_bytes_are(pair: Pair) -> None:
    writer, reader = pair
    want = writer.fill(0, 64 * MIB, seed=1)

    handle = writer.post("reader", [(0, 32 * MIB, 64 * MIB)], f"{32 * MIB}:{64 * MIB}")
    outcome(writer, handle)

    assert wait_for(lambda: reader.landed(f"{32 * MIB}:{64 * MIB}")) == want


def test_a_writer_knows_over_what_its_writes_go(new_pair: Pair, transport: str) -> None:
    writer, reader = new_pair
    before = writer.route("nobody")

    outcome(writer, writer.post("reader", [(0, 0, MIB)], "n"))
    first = writer.route("reader")
    writer.disconnect("reader")
    writer.connect(**reader.address())
    outcome(writer, writer.post("reader", [(0, 0, MIB)], "again"))

    assert before == "" or writer.route("nobody") == before  # loopback has one for all
    assert writer.route("reader") == first  # UCX says nothing of a second link like the first
    begins = {"loopback": ("sockets/",), "nixl-tcp": ("tcp/",), "nixl": ("cma/", "posix/", "sysv/", "xpmem/", "tcp/")}
    of_the_rest = first.removeprefix("cuda_ipc/direct or ")
    assert of_the_rest.startswith(begins[transport.removeprefix("direct-")]), first
    assert (of_the_rest != first) == (transport in DIRECT_KINDS)


def test_scattered_pieces_land_in_their_places(pair: Pair) -> None:
    writer, reader = pair
    digests = [writer.fill(i * 100_000, 73_728, seed=i) for i in range(100)]
    order = [(i * 37) % 100 for i in range(100)]

    handle = writer.post("reader", [(i * 100_000, order[i] * 80_000, 73_728) for i in range(100)], "all")
    outcome(writer, handle)
    wait_for(reader.notices)

    assert [reader.digest(order[i] * 80_000, 73_728) for i in range(100)] == digests


def test_a_fence_that_is_done_comes_after_scattered_pieces_too(pair: Pair) -> None:
    writer, reader = pair
    want = writer.fill(0, 64 * MIB, seed=2)

    parts = [[(i * MIB, i * MIB, MIB) for i in range(first, 64, 4)] for first in range(4)]
    data = [writer.post("reader", part, f"part {number}") for number, part in enumerate(parts)]
    fence = writer.fence("reader", 77, 4242)
    outcome(writer, fence)

    assert reader.cell(77) == 4242
    assert reader.digest(0, 64 * MIB) == want
    assert [outcome(writer, handle) for handle in data] == [["Done", 16 * MIB]] * 4
    assert wait_for(lambda: len(reader.notices()) == 4)


def test_each_write_announces_itself_once(pair: Pair) -> None:
    writer, reader = pair

    handles = [writer.post("reader", [(0, i * 1000, 999)], f"part {i}") for i in range(200)]
    for handle in handles:
        outcome(writer, handle)
        writer.release(handle)
    wait_for(lambda: len(reader.notices()) >= 200)

    assert sorted(reader.notices()) == sorted(["writer", f"part {i}"] for i in range(200))


def test_scattered_parts_are_announced_each_once_when_all_their_bytes_are_in(pair: Pair) -> None:
    """More than are on their way one by one: some wait for each other and leave together."""
    writer, reader = pair
    size, piece = 64 << 10, 4 << 10
    parts = {f"{at * size}:{size}": writer.fill(at * size, size, seed=at) for at in range(40)}

    handles = []
    for notice in parts:
        begin = int(notice.partition(":")[0])
        pieces = [(begin + at * 5 % 16 * piece, begin + at * 5 % 16 * piece, piece) for at in range(16)]
        handles.append(writer.post("reader", pieces, notice))

    assert [outcome(writer, handle) for handle in handles] == [["Done", size]] * len(parts)
    wait_for(lambda: len(reader.notices()) == len(parts))
    assert {notice: reader.landed(notice) for notice in parts} == parts
    assert sorted(reader.notices()) == sorted(["writer", notice] for notice in parts)
    assert sum(value for name, value in writer.counted().items() if name.endswith("_bytes_total")) == 40 * size


def test_the_bytes_counted_are_the_bytes_posted(pair: Pair) -> None:
    writer, _ = pair
    sizes = (1, 4096, 73_728, 5 * MIB)

    counted = []
    for size in sizes:
        handle = writer.post("reader", [(0, 0, size), (size, 2 * size, size)], "x")
        counted.append(outcome(writer, handle))

    assert counted == [["Done", 2 * size] for size in sizes]
    [total] = [value for name, value in writer.counted().items() if name.endswith("_bytes_total")]
    assert total == 2 * sum(sizes)


def test_a_fence_that_is_done_comes_after_everything_posted_before(pair: Pair) -> None:
    writer, reader = pair
    want = writer.fill(0, 64 * MIB, seed=2)

    data = [writer.post("reader", [(i * 8 * MIB, i * 8 * MIB, 8 * MIB)], f"part {i}") for i in range(8)]
    fence = writer.fence("reader", 78, 4243)
    outcome(writer, fence)

    assert reader.cell(78) == 4243
    assert reader.digest(0, 64 * MIB) == want
    assert all(outcome(writer, handle)[0] == "Done" for handle in data)


def test_our_own_fences_leave_the_cells_that_peers_write_alone(new_pair: Pair) -> None:
    """A node that reads and writes: a number of ours in a cell would pass for a peer's proof, or wipe one out."""
    writer, reader = new_pair
    reader.connect(**writer.address())
    outcome(reader, reader.fence("writer", 1023, 7))

    for cell in range(64):  # with all sources in use at once
        outcome(writer, writer.fence("reader", cell, 100 + cell))

    assert [reader.cell(cell) for cell in range(64)] == [100 + cell for cell in range(64)]
    assert [cell for cell in range(1024) if writer.cell(cell)] == [1023]
    assert writer.cell(1023) == 7


def test_a_fence_announces_nothing(pair: Pair) -> None:
    writer, reader = pair

    outcome(writer, writer.fence("reader", 1, 5))

    assert reader.cell(1) == 5
    assert reader.notices() == []


def test_damaged_metadata_is_refused(new_party: NewParty, pair: Pair) -> None:
    writer, (_, reader) = new_party("another writer"), pair
    address = reader.address()
    metadata = bytearray.fromhex(address["metadata"])
    metadata[len(metadata) // 2] ^= 1

    with pytest.raises(PartyError, match=r"InvalidRequestError: the metadata of agent reader .* digest"):
        writer.connect(**{**address, "metadata": metadata.hex()})


def test_an_address_of_another_transport_is_refused(new_party: NewParty, pair: Pair) -> None:
    writer, (_, reader) = new_party("another writer"), pair

    with pytest.raises(PartyError, match="InvalidRequestError: agent reader speaks 'pigeon'"):
        writer.connect(**{**reader.address(), "transport": "pigeon"})


def test_nothing_is_posted_to_a_stranger(pair: Pair) -> None:
    writer, _ = pair

    with pytest.raises(PartyError, match="TransferError: agent stranger is not connected"):
        writer.post("stranger", [(0, 0, 1)], "x")


def test_a_known_peer_can_be_connected_again_and_after_it_was_forgotten(pair: Pair) -> None:
    writer, reader = pair

    writer.connect(**reader.address())
    first = writer.post("reader", [(0, 0, 10)], "first")
    outcome(writer, first)
    writer.release(first)
    writer.disconnect("reader")
    writer.connect(**reader.address())
    second = writer.post("reader", [(0, 0, 10)], "second")

    assert outcome(writer, second) == ["Done", 10]


def test_a_dead_peer_fails_its_own_writes_only(new_pair: Pair, new_party: NewParty) -> None:
    writer, reader = new_pair
    other = new_party("other")
    writer.connect(**other.address())
    outcome(writer, writer.post("reader", [(0, 0, 10)], "x"))

    reader.kill()
    lost = writer.post("reader", [(0, 0, 64 * MIB)], "lost")
    kept = writer.post("other", [(0, 0, 8 * MIB)], "kept")

    assert outcome(writer, lost, within_s=60)[0] == "Failed"
    assert outcome(writer, kept) == ["Done", 8 * MIB]
    assert wait_for(other.notices) == [["writer", "kept"]]


def test_a_restarted_peer_is_reached_under_its_new_name(new_pair: Pair, new_party: NewParty) -> None:
    writer, reader = new_pair
    reader.kill()

    again = new_party("reader")  # the same name, new metadata
    writer.connect(**again.address())
    handle = writer.post("reader", [(0, 0, MIB)], "hello")

    assert outcome(writer, handle) == ["Done", MIB]
    assert wait_for(again.notices) == [["writer", "hello"]]


def test_a_stopped_writer_lands_everything_when_it_goes_on(pair: Pair) -> None:
    writer, reader = pair
    want = writer.fill(0, 64 * MIB, seed=3)
    handle = writer.post("reader", [(0, 0, 64 * MIB)], f"0:{64 * MIB}")
    os.kill(writer.process.pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(writer.process.pid, signal.SIGCONT)

    assert outcome(writer, handle) == ["Done", 64 * MIB]
    assert wait_for(lambda: reader.landed(f"0:{64 * MIB}")) == want


def test_a_second_after_its_death_nothing_of_a_writer_lands_any_more(new_pair: Pair) -> None:
    writer, reader = new_pair
    writer.fill(0, 64 * MIB, seed=4)
    reader.set_polls(False)
    for i in range(2):
        writer.post("reader", [(0, i * 64 * MIB, 64 * MIB)], "x")
    writer.kill()

    reader.set_polls(True)
    time.sleep(1.0)
    then = reader.digest(0, 128 * MIB)
    time.sleep(0.5)

    assert reader.digest(0, 128 * MIB) == then
