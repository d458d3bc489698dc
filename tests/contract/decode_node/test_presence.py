"""A decode node in the registry: its own life, older ones of its name, and what changes while it is being told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from decode_lab import until
from kvrelay.core.types import Incarnation
from kvrelay.decode_node.presence import Presence
from kvrelay.index.registry import NodeRegistry
from kvrelay.proto import convert
from kvrelay.proto.v1 import fleet_pb2

OLDER, NODE = Incarnation("decode", 1), Incarnation("decode", 2)


def a_record(node: Incarnation, *, draining: bool = False) -> fleet_pb2.NodeRecord:
    return fleet_pb2.NodeRecord(node=convert.incarnation_to_pb(node), draining=draining)


@pytest.fixture
async def registry(index_url: str) -> AsyncIterator[NodeRegistry]:
    opened = NodeRegistry(index_url, "presence")
    yield opened
    await opened.withdraw(NODE)
    await opened.close()


@asynccontextmanager
async def a_presence(
    index_url: str, record: Callable[[], fleet_pb2.NodeRecord | None], *, heartbeat_s: float
) -> AsyncIterator[tuple[Presence, asyncio.Event]]:
    """A node's presence, not entered yet, and whether it takes itself for replaced."""
    replaced = asyncio.Event()
    presence = Presence(
        NodeRegistry(index_url, "presence"),
        record=record,
        writers=frozenset,
        on_writer_replaced=lambda writer, why: None,
        on_replaced=replaced.set,
        heartbeat_s=heartbeat_s,
    )
    try:
        yield presence, replaced
    finally:
        await presence.leave(NODE)


async def test_a_node_that_could_not_enter_at_first_replaces_its_older_life_later(
    index_url: str, registry: NodeRegistry
) -> None:
    await registry.register(a_record(OLDER), ttl_s=30)
    may_be_found = False

    def record() -> fleet_pb2.NodeRecord | None:
        return a_record(NODE) if may_be_found else None

    async with a_presence(index_url, record, heartbeat_s=0.05) as (presence, replaced):
        await presence.enter()
        running = asyncio.create_task(presence.run())
        may_be_found = True

        async with asyncio.timeout(20):
            while (await registry.nodes()) != [a_record(NODE)] and not replaced.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        assert not replaced.is_set()
        running.cancel()


async def test_what_changes_while_the_registry_is_told_is_told_again_at_once(
    index_url: str, registry: NodeRegistry
) -> None:
    told: list[fleet_pb2.NodeRecord] = []

    def record() -> fleet_pb2.NodeRecord:
        told.append(a_record(NODE, draining=len(told) > 1))
        if len(told) == 2:
            asyncio.get_running_loop().call_soon(presence.hurry)  # the record is on its way already
        return told[-1]

    async with a_presence(index_url, record, heartbeat_s=60.0) as (presence, _):
        await presence.enter()
        running = asyncio.create_task(presence.run())

        await until(lambda: len(told) == 3, within_s=20)

        running.cancel()
