"""Two routers in front of one fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvrelay.core.clock import monotonic
from kvrelay.core.types import Incarnation
from kvrelay.index.reader import PrefixReader
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.router_loads import RouterLoads
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.fleet import FleetView
from kvrelay.router.peers import Placed
from kvrelay.router.placer import IndexPlacer
from kvrelay.router.replicas import Replicas, together
from kvrelay.router.score import Load

FLEET = "shared"
A, B, D = (Incarnation(name, 1) for name in ("a", "b", "d"))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    started = EmbeddedServer.start()
    yield started
    started.stop()


@dataclass
class Half:
    """What places requests in one of the routers."""

    placer: IndexPlacer
    replicas: Replicas

    async def place(self, *, seed: int) -> Placed:
        ids = np.random.default_rng(seed).integers(0, 1000, 2000, dtype=np.int32)
        return await self.placer.place(token_ids=ids, max_tokens=9, needs_decode=True, avoid=frozenset())


@asynccontextmanager
async def a_router(server: EmbeddedServer, name: str) -> AsyncIterator[Half]:
    registry, reader = NodeRegistry(server.url, FLEET), PrefixReader(server.url, FLEET)
    fleet = FleetView(registry, refresh_s=60, put_aside_s=1, max_message_bytes=1 << 20, max_request_s=10)
    await fleet.start()
    placer = IndexPlacer(
        fleet,
        reader,
        long_prompt_tokens=1 << 20,
        others=lambda: replicas.others(),  # noqa: PLW0108 - made below
        on_placed=lambda: replicas.hurry(),  # noqa: PLW0108
    )
    replicas = Replicas(Incarnation.new(name), RouterLoads(server.url, FLEET), own=placer.own_loads)
    await replicas.start()
    try:
        yield Half(placer, replicas)
    finally:
        await replicas.stop()
        await fleet.stop()
        await reader.close()
        await registry.close()


@asynccontextmanager
async def two_routers(server: EmbeddedServer) -> AsyncIterator[tuple[Half, Half]]:
    registry = NodeRegistry(server.url, FLEET)
    for node, role in (
        (A, fleet_pb2.NODE_ROLE_PREFILL),
        (B, fleet_pb2.NODE_ROLE_PREFILL),
        (D, fleet_pb2.NODE_ROLE_DECODE),
    ):
        await registry.register(
            fleet_pb2.NodeRecord(
                node=convert.incarnation_to_pb(node), role=role, ring_size=1, layout_fingerprint=b"f",
                max_model_len=100_000, block_tokens=64, page_tokens=64, total_pages=10_000, free_pages=10_000,
            ), ttl_s=60,
        )  # fmt: skip
    async with a_router(server, "r") as one, a_router(server, "r") as other:  # one name, as an operator may give
        yield one, other
    await registry.close()


async def until_heard(half: Half, node: Incarnation, requests: int) -> None:
    async with asyncio.timeout(5):
        while half.replicas.others().get(node, Load()).requests != requests:  # noqa: ASYNC110 - told by another
            await asyncio.sleep(0.01)


async def test_what_one_router_places_counts_in_the_other(server: EmbeddedServer) -> None:
    async with two_routers(server) as (one, other):
        first = await one.place(seed=1)
        taken = first.prefill.incarnation
        await until_heard(other, taken, 1)
        second = await other.place(seed=2)

        assert {taken, second.prefill.incarnation} == {A, B}
        first.release()
        await until_heard(other, taken, 0)
        second.release()


async def test_a_burst_through_two_routers_is_spread_as_by_one(server: EmbeddedServer) -> None:
    async with two_routers(server) as (one, other):
        placed = []
        for at in range(20):
            half = (one, other)[at % 3 == 0]
            placed.append(await half.place(seed=at))
            await one.replicas.exchange()
            await other.replicas.exchange()
            await one.replicas.exchange()
        on_a = sum(each.prefill.incarnation == A for each in placed)
        for each in placed:
            each.release()

    assert 8 <= on_a <= 12


async def test_a_router_that_leaves_takes_its_load_with_it(server: EmbeddedServer) -> None:
    async with a_router(server, "stays") as stays:
        async with two_routers(server) as (one, _):
            placed = await one.place(seed=1)
            await until_heard(stays, placed.prefill.incarnation, 1)
            placed.release()
        await stays.replicas.exchange()

        assert stays.replicas.num_routers == 1
        assert sum(load.requests for load in stays.replicas.others().values()) == 0


async def test_others_that_were_not_heard_of_for_a_while_do_not_count() -> None:
    replicas = Replicas(A, RouterLoads("redis://127.0.0.1:1/0", FLEET), own=dict)
    replicas._others, replicas._heard_s = {A: Load(5)}, monotonic()
    assert replicas.others() == {A: Load(5)}
    replicas._heard_s -= 10

    assert replicas.others() == {}
    await replicas.stop()


def test_loads_of_routers_add_up() -> None:
    assert together({A: Load(1, 10, 2, (0.5,), 1.0)}, {A: Load(2, 5, 0, (0.1, 0.2), 0.5), B: Load(1)}) == {
        A: Load(3, 15, 2), B: Load(1),
    }  # fmt: skip
    summed = together({A: Load(works_s=(0.5,), recent_s=1.0)}, {A: Load(works_s=(0.1,), recent_s=0.5)})[A]
    assert (summed.works_s, summed.recent_s) == ((0.5, 0.1), 1.5)
