"""Which nodes a fleet has, against every index server: our own, and a plain Redis where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrelay.core.errors import SettingsError, StaleMessageError, UnavailableError
from kvrelay.core.types import Incarnation
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.v1.fleet_pb2 import NODE_ROLE_PREFILL, NodeRecord

FLEET = "test"
A, B = Incarnation("a", 1), Incarnation("b", 2**63 - 1)


@asynccontextmanager
async def a_registry(server: EmbeddedServer) -> AsyncIterator[NodeRegistry]:
    registry = NodeRegistry(server.url, FLEET)
    try:
        yield registry
    finally:
        await registry.close()


def a_record(node: Incarnation, *, free_pages: int = 0) -> NodeRecord:
    return NodeRecord(node=convert.incarnation_to_pb(node), role=NODE_ROLE_PREFILL, free_pages=free_pages)


async def names(registry: NodeRegistry) -> dict[str, int]:
    return {record.node.name: record.node.start_id for record in await registry.nodes()}


async def test_a_registered_node_is_listed_until_it_withdraws(server: EmbeddedServer) -> None:
    async with a_registry(server) as registry:
        await registry.register(a_record(A))
        await registry.register(a_record(B, free_pages=7))
        listed = {record.node.name: record for record in await registry.nodes()}
        await registry.withdraw(A)

        assert listed["a"] == a_record(A)
        assert listed["b"].free_pages == 7
        assert await names(registry) == {"b": B.start_id}


async def test_the_life_of_a_registry_ends_when_it_loses_everything_and_not_when_nodes_leave(
    server: EmbeddedServer,
) -> None:
    async with a_registry(server) as registry:
        await registry.register(a_record(A))
        await registry.nodes()
        life = registry.life
        await registry.withdraw(A)
        await registry.nodes()
        left = registry.life
        await registry._redis.flushall()
        await registry.nodes()
        emptied = registry.life
        await registry.heartbeat(a_record(A))
        await registry.nodes()

    assert life
    assert (left, emptied) == (life, b"")
    assert registry.life not in (life, b"")


async def test_a_node_without_heartbeats_is_forgotten_when_its_lease_is_over(server: EmbeddedServer) -> None:
    async with a_registry(server) as registry:
        await registry.register(a_record(A), ttl_s=0.1)
        await registry.register(a_record(B), ttl_s=0.1)
        await registry.heartbeat(a_record(B), ttl_s=5)
        await asyncio.sleep(0.15)

        assert await names(registry) == {"b": B.start_id}


async def test_a_newer_life_of_a_name_replaces_the_older_which_is_told(server: EmbeddedServer) -> None:
    younger = Incarnation("a", 99)
    async with a_registry(server) as registry:
        await registry.register(a_record(A))
        await registry.register(a_record(younger))
        with pytest.raises(StaleMessageError, match="'a'"):
            await registry.heartbeat(a_record(A))
        await registry.withdraw(A)

        assert await names(registry) == {"a": 99}


async def test_a_heartbeat_enters_a_node_that_the_server_has_lost(server: EmbeddedServer) -> None:
    async with a_registry(server) as registry:
        await registry.heartbeat(a_record(A))

        assert await names(registry) == {"a": 1}


async def test_fleets_on_one_server_do_not_see_each_others_nodes(server: EmbeddedServer) -> None:
    async with a_registry(server) as registry:
        await registry.register(a_record(A))
        other = NodeRegistry(server.url, "other")

        assert await other.nodes() == []
        await other.close()


async def test_a_registry_without_a_server_says_so() -> None:
    registry = NodeRegistry("redis://127.0.0.1:1/0", FLEET)

    with pytest.raises(UnavailableError, match="index server"):
        await registry.nodes()
    await registry.close()


def test_an_index_url_of_something_else_is_refused() -> None:
    with pytest.raises(SettingsError, match="ftp"):
        NodeRegistry("ftp://127.0.0.1", FLEET)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:secret@host/0", "ftp://host/0"),
        ("redis://me:secret@host:6379/0?socket_timeout=long", "redis://host:6379/0"),
        ("redis://host/0?password=secret&socket_timeout=long", "redis://host/0"),
    ],
)
def test_a_wrong_index_url_is_named_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(SettingsError) as refused:
        NodeRegistry(url, FLEET)

    assert f"index_url {shown!r}: " in str(refused.value)
    assert "secret" not in str(refused.value)
