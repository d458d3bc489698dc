"""A prefill node whose name was taken by a newer process: it leaves in order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvrelay.core.supervise import watch_threads
from kvrelay.core.types import Incarnation
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.server import EmbeddedServer
from kvrelay.prefill_node.leases import Leases
from kvrelay.prefill_node.registration import LeaseThread
from kvrelay.proto import convert
from kvrelay.proto.v1 import fleet_pb2

NODE, NEWER, ROUTER = Incarnation("prefill", 1), Incarnation("prefill", 2), Incarnation("router", 3)


@pytest.fixture
def index() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer.start()
    yield server
    server.stop()


def a_record(node: Incarnation) -> fleet_pb2.NodeRecord:
    return fleet_pb2.NodeRecord(node=convert.incarnation_to_pb(node))


def a_thread(
    index: EmbeddedServer,
    *,
    fleet: str,
    heartbeat_s: float,
    record: Callable[[], fleet_pb2.NodeRecord | None] = lambda: a_record(NODE),
    leases: Leases | None = None,
    on_replaced: Callable[[], object] = lambda: None,
) -> LeaseThread:
    return LeaseThread(
        Leases(lease_s=5, on_expired=lambda key, reason: None) if leases is None else leases,
        NODE,
        index_url=index.url,
        fleet=fleet,
        heartbeat_s=heartbeat_s,
        record=record,
        on_replaced=on_replaced,
    )


async def test_a_replaced_node_goes_on_checking_leases_until_it_is_stopped(index: EmbeddedServer) -> None:
    replaced, expired = threading.Event(), threading.Event()
    leases = Leases(lease_s=0.5, on_expired=lambda key, reason: expired.set())
    thread = a_thread(index, fleet="test", heartbeat_s=0.05, leases=leases, on_replaced=replaced.set)
    thread.start(wait_s=5)
    registry = NodeRegistry(index.url, "test")
    await registry.register(a_record(NEWER))
    assert replaced.wait(20)

    leases.open("a#1", request_id="a", holder=ROUTER)

    assert expired.wait(20)
    thread.beat_now()
    thread.stop()
    assert await registry.nodes() == [a_record(NEWER)]
    await registry.close()


async def test_a_stalled_node_leaves_the_registry_and_comes_back_when_it_moves(index: EmbeddedServer) -> None:
    stalled = threading.Event()
    thread = a_thread(
        index, fleet="stalls", heartbeat_s=0.05, record=lambda: None if stalled.is_set() else a_record(NODE)
    )
    thread.start(wait_s=5)
    registry = NodeRegistry(index.url, "stalls")
    assert await registry.nodes() == [a_record(NODE)]

    stalled.set()
    await until_registered(registry, [])
    stalled.clear()
    thread.beat_now()
    await until_registered(registry, [a_record(NODE)])

    thread.stop()
    await registry.close()


async def test_a_queue_that_has_ended_is_told_sooner_than_a_heartbeat_comes(index: EmbeddedServer) -> None:
    busy, idle = a_record(NODE), a_record(NODE)
    busy.queued_tokens = 1000
    records = [busy]
    thread = a_thread(index, fleet="queues", heartbeat_s=4.0, record=lambda: records[-1])
    thread.start(wait_s=5)
    registry = NodeRegistry(index.url, "queues")
    assert await registry.nodes() == [busy]

    records.append(idle)
    began_s = time.monotonic()
    await until_registered(registry, [idle])
    assert time.monotonic() - began_s < 3.0

    thread.stop()
    await registry.close()


def test_a_bug_on_the_lease_thread_is_told_and_does_not_end_it_silently(
    index: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # puts it back
    bugs: list[str] = []
    no_jobs: dict[str, None] = {}
    watch_threads(bugs.append)
    leases = Leases(lease_s=0.1, on_expired=lambda key, reason: no_jobs[key])
    leases.open("a#1", request_id="a", holder=ROUTER)
    thread = a_thread(index, fleet="bugs", heartbeat_s=9, leases=leases)
    thread.start(wait_s=5)
    ends_s = time.monotonic() + 5
    while not bugs and time.monotonic() < ends_s:
        time.sleep(0.02)

    assert bugs == ["the lease thread was ended by a bug: KeyError: 'a#1'"]


async def until_registered(registry: NodeRegistry, records: list[fleet_pb2.NodeRecord]) -> None:
    ends_s = time.monotonic() + 5
    while (found := await registry.nodes()) != records:
        assert time.monotonic() < ends_s, f"still {found}"
        await asyncio.sleep(0.02)
