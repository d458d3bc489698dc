"""The transfer thread says when it cannot start, and never ends silently."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from handoff_lab import Memory
from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.fence_cells import HostCells
from kvrelay.kv_transfer.transport import Transport
from memory import region_of
from transport_party import new_transport


def make(memory: Memory, counters: Counters) -> Transport:
    return new_transport(
        "loopback",
        name="here",
        pool=region_of(memory.mapping),
        pool_pages=memory.num_pages,
        cells=HostCells(64),
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

    assert died.wait(5)
    assert "the transfer thread died" in caplog.text


def test_a_drain_is_done_after_its_time_of_polling_and_not_before() -> None:
    thread = TransferThread(partial(make, Memory(1)), on_fatal=lambda: None)
    thread.start()
    done = threading.Event()

    thread.drain(0.3, done.set)

    assert not done.wait(0.25)
    assert done.wait(5)
    thread.stop()
