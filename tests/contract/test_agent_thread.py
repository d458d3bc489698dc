"""The transfer thread says when it cannot start, and never ends silently."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

from faulty_transport import FaultyTransport, freeze
from handoff_lab import Memory
from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters, Epoch, Incarnation
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.landing import Expected
from kvrelay.kv_transfer.nixl import NixlTransport, nixl_errors
from kvrelay.kv_transfer.notice import NoticeKey
from kvrelay.kv_transfer.outgoing import Posting
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import Handle, Progress, Transport
from kvrelay.kv_transfer.values import Request
from memory import region_of
from transport_party import new_transport


def make(memory: Memory, counters: Counters, *, name: str = "here") -> Transport:
    return new_transport(
        "loopback",
        name=name,
        pool=region_of(memory.mapping),
        pool_pages=memory.num_pages,
        fences=FenceMemory.on_host(64),
        counters=counters,
    )


def test_a_transport_that_cannot_start_is_reported_by_start() -> None:
    def refuse(_: Counters) -> Transport:
        raise TransferError("no such device")

    with pytest.raises(TransferError, match="no such device"):
        TransferThread(refuse, on_fatal=lambda: None).start()


def test_a_transport_that_is_not_installed_is_reported_at_once_by_name() -> None:
    def miss(_: Counters) -> Transport:
        raise ImportError("no module named transport")

    with pytest.raises(ImportError, match="no module named transport"):
        TransferThread(miss, on_fatal=lambda: None).start()


def test_a_bug_on_the_thread_reaches_the_process(caplog: pytest.LogCaptureFixture) -> None:
    died = threading.Event()
    thread = TransferThread(partial(make, Memory(1)), on_fatal=died.set)
    thread.start()
    not_an_address: Any = None

    thread.open_writer("w", thread.address, fence_cell=0, fence_value=1, on_events=not_an_address)
    thread.fence("w")

    assert died.wait(20)
    assert "the transfer thread died" in caplog.text


def test_a_drain_is_done_after_its_time_of_polling_and_not_before() -> None:
    thread = TransferThread(partial(make, Memory(1)), on_fatal=lambda: None)
    thread.start()
    done = threading.Event()

    began_s = time.monotonic()
    thread.drain(0.3, done.set)

    assert done.wait(20)
    assert time.monotonic() - began_s >= 0.3
    thread.stop()


def test_a_reader_in_a_hurry_polls_more_often_and_not_for_long() -> None:
    now_s = 10.0
    thread = TransferThread(partial(make, Memory(1)), on_fatal=lambda: None, clock=lambda: now_s)
    transport = make(Memory(1), Counters())

    def pause_s() -> float | None:
        for command in thread._take_commands(0):
            assert command is not None
            command(transport)
        return thread._step(transport)

    key = NoticeKey.of(Epoch(Incarnation("decode", 1), 1), Request("r", 1))
    thread.expect(key, Expected((), lambda part: True, lambda parts: None))
    usual_s = pause_s()
    thread.hurry()
    hurried_s = pause_s()
    assert usual_s is not None
    assert hurried_s is not None
    assert 0 < hurried_s <= usual_s / 4
    now_s += 0.1
    assert pause_s() == usual_s


class Counting(FaultyTransport):
    """Writes never end; counts how often they are asked for."""

    num_polls = 0

    def poll(self, handle: Handle) -> Progress:
        self.num_polls += 1
        return super().poll(handle)


def test_writes_that_nobody_waits_for_any_more_are_polled_rarely() -> None:
    made: list[Counting] = []

    def make_counting(counters: Counters) -> Transport:
        made.append(Counting(make(Memory(1), counters), freeze, from_write=0))
        return made[0]

    thread = TransferThread(make_counting, on_fatal=lambda: None)
    address = thread.start()
    thread.open_writer("w", address, fence_cell=0, fence_value=1, on_events=lambda events: None)
    thread.post_part("w", Posting((Copy(0, 0, 64),), b"notice"))
    until_s = time.monotonic() + 20
    while made[0].num_polls < 50 and time.monotonic() < until_s:  # in twenty seconds it would be 400 of the rare ones
        time.sleep(0.005)
    began_s, awaited = time.monotonic(), made[0].num_polls
    awaited_s = 20 - (until_s - began_s)
    thread.close_writer("w")
    time.sleep(0.1)
    before, began_s = made[0].num_polls, time.monotonic()
    time.sleep(0.5)
    rate = (made[0].num_polls - before) / (time.monotonic() - began_s)

    assert awaited / awaited_s > 60
    assert rate < 40
    thread.stop()


class Parting(FaultyTransport):
    """Notes whom it disconnects from."""

    def __init__(self, real: Transport) -> None:
        super().__init__(real, freeze)
        self.left: list[str] = []

    def disconnect(self, peer: str) -> None:
        self.left.append(peer)
        self.real.disconnect(peer)


class Drains:
    """Listens for the end of a writer."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def __call__(self, events: object) -> None:
        self.came.set()


def test_of_peers_without_a_hand_off_only_the_latest_stay_connected() -> None:
    made: list[Parting] = []

    def make_parting(counters: Counters) -> Transport:
        made.append(Parting(make(Memory(1), counters)))
        return made[0]

    thread = TransferThread(make_parting, on_fatal=lambda: None, max_idle_peers=2)
    thread.start()
    readers = [make(Memory(1), Counters(), name=f"reader-{number}") for number in range(4)]
    used = [0, 1, 0, 2, 3]  # the first again after the second, so it is not the oldest

    for turn, number in enumerate(used):
        key, address, drained = f"w{turn}", readers[number].address(), Drains()
        thread.open_writer(key, address, fence_cell=0, fence_value=1, on_events=drained)
        thread.finish(key)
        assert drained.came.wait(20)
        thread.close_writer(key)
    until_s = time.monotonic() + 5
    while len(made[0].left) < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    thread.stop()

    assert made[0].left == ["reader-1", "reader-0"]


def test_a_transport_that_cannot_be_read_any_more_ends_the_process_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> None:
        raise nixl_errors()[0]("the device is gone")

    died = threading.Event()
    memory = Memory(1)

    def make_nixl(counters: Counters) -> Transport:
        transport = new_transport(
            "nixl",
            name="reader",
            pool=region_of(memory.mapping),
            pool_pages=1,
            fences=FenceMemory.on_host(64),
            counters=counters,
        )
        assert isinstance(transport, NixlTransport)
        transport._agent.get_new_notifs = broken
        return transport

    thread = TransferThread(make_nixl, on_fatal=died.set)
    thread.start()
    thread.drain(1.0, lambda: None)

    assert died.wait(20)
    assert "TransferError: NIXL cannot read what peers announced" in caplog.text
    assert "the device is gone" in caplog.text
