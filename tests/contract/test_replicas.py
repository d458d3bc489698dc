"""Two routers in front of one fleet."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.clock import ManualClock
from kvrelay.core.errors import UnavailableError
from kvrelay.core.types import Incarnation
from kvrelay.index import router_loads
from kvrelay.index.client import ask
from kvrelay.index.reader import PrefixReader
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.router_loads import RouterLoads, Told
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.proto.v1.fleet_pb2 import NodeLoad
from kvrelay.router.fleet import FleetView
from kvrelay.router.load_columns import RECENT_S, LoadColumns
from kvrelay.router.others import OthersLoads
from kvrelay.router.peers import Placed
from kvrelay.router.placer import IndexPlacer
from kvrelay.router.replicas import Replicas, _record, together
from kvrelay.router.score import Load

FLEET = "shared"
A, B, D = (Incarnation(name, 1) for name in ("a", "b", "d"))


@dataclass
class Half:
    """What places requests in one of the routers."""

    placer: IndexPlacer
    replicas: Replicas

    async def place(self, *, seed: int) -> Placed:
        ids = np.random.default_rng(seed).integers(0, 1000, 2000, dtype=np.int32)
        return await self.placer.place(token_ids=ids, max_tokens=9, needs_decode=True, avoid=frozenset())


@asynccontextmanager
async def a_router(index: EmbeddedServer, name: str) -> AsyncIterator[Half]:
    registry, reader = NodeRegistry(index.url, FLEET), PrefixReader(index.url, FLEET)
    fleet = FleetView(registry, refresh_s=60, put_aside_s=1, max_message_bytes=1 << 20, max_request_s=10)
    await fleet.start()
    placer = IndexPlacer(
        fleet,
        reader,
        long_prompt_tokens=1 << 20,
        others=lambda: replicas.others(),  # noqa: PLW0108 - made below
        on_placed=lambda: replicas.hurry(),  # noqa: PLW0108
    )
    replicas = Replicas(RouterLoads(index.url, FLEET, Incarnation.new(name)), own=placer.own_loads)
    await replicas.start()
    try:
        yield Half(placer, replicas)
    finally:
        await replicas.stop()
        await fleet.stop()
        await reader.close()
        await registry.close()


@asynccontextmanager
async def two_routers(index: EmbeddedServer) -> AsyncIterator[tuple[Half, Half]]:
    registry = NodeRegistry(index.url, FLEET)
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
    async with a_router(index, "r") as one, a_router(index, "r") as other:  # one name, as an operator may give
        yield one, other
    await registry.close()


async def until_heard(half: Half, node: Incarnation, requests: int) -> None:
    async with asyncio.timeout(20):
        while half.replicas.others().get(node, Load()).requests != requests:  # noqa: ASYNC110 - told by another
            await asyncio.sleep(0.01)


async def test_what_one_router_places_counts_in_the_other(index: EmbeddedServer) -> None:
    async with two_routers(index) as (one, other):
        first = await one.place(seed=1)
        taken = first.prefill.incarnation
        await until_heard(other, taken, 1)
        second = await other.place(seed=2)

        assert {taken, second.prefill.incarnation} == {A, B}
        first.release()
        await until_heard(other, taken, 0)
        second.release()


async def test_a_burst_through_two_routers_is_spread_as_by_one(index: EmbeddedServer) -> None:
    async with two_routers(index) as (one, other):
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


async def test_a_router_that_leaves_takes_its_load_with_it(index: EmbeddedServer) -> None:
    async with a_router(index, "stays") as stays:
        async with two_routers(index) as (one, _):
            placed = await one.place(seed=1)
            await until_heard(stays, placed.prefill.incarnation, 1)
            placed.release()
        await stays.replicas.exchange()

        assert stays.replicas.num_routers == 1
        assert sum(load.requests for load in stays.replicas.others().values()) == 0


async def test_others_that_were_not_heard_of_for_a_while_do_not_count() -> None:
    clock = ManualClock(100.0)
    replicas = Replicas(RouterLoads("redis://127.0.0.1:1/0", FLEET, A), own=LoadColumns, clock=clock)
    replicas._others.hear([a_word("r", {A: Load(5)}, is_whole=True)], clock())
    replicas._heard_s = clock()
    assert replicas.others() == {A: Load(5)}
    clock.advance(10)

    assert replicas.others() == {}
    await replicas.stop()


def a_word(router: str, loads: Mapping[Incarnation, Load], *, is_whole: bool = False) -> Told:
    return Told(router, is_whole, tuple(_record(node, loads) for node in loads))


some_load = st.builds(
    Load, st.integers(0, 3), st.integers(0, 900), st.integers(0, 9),
    st.lists(st.sampled_from((0.5, 2.0)), max_size=2).map(tuple), st.sampled_from((0.0, 8.0)),
    fetches=st.lists(st.sampled_from((64, 4096)), max_size=2).map(tuple),
)  # fmt: skip
some_word = st.tuples(st.sampled_from("xyz"), st.dictionaries(st.sampled_from((A, B, D)), some_load), st.booleans())


@given(st.lists(st.one_of(some_word, st.sampled_from("xyz")), max_size=25))
def test_the_columns_of_others_are_the_sum_of_what_each_told_last(
    words: list[tuple[str, dict[Incarnation, Load], bool] | str],
) -> None:
    others, last = OthersLoads(), dict[str, dict[Incarnation, Load]]()
    for word in words:
        told = []
        if isinstance(word, str):  # it leaves
            last.pop(word, None)
        else:
            router, loads, is_whole = word
            told = [a_word(router, loads, is_whole=is_whole)]
            last[router] = {**({} if is_whole else last.get(router, {})), **loads}
        silent = last.keys() - {said.router for said in told}
        others.hear([*told, *(a_word(one, {}) for one in silent)], 5.0)
        for node in (A, B, D):
            each = [loads[node] for loads in last.values() if node in loads]
            sum_of = others.columns.get(node, Load())
            counted = [one for one in each if one.requests or one.works_s or one.recent_s or one.fetches]
            assert sum_of.requests == sum(one.requests for one in counted)
            assert (sum_of.tokens, sum_of.pages) == tuple(
                sum(getattr(one, name) for one in counted) for name in ("tokens", "pages")
            )
            assert sorted(sum_of.works_s) == sorted(work for one in counted for work in one.works_s)
            assert sorted(sum_of.fetches) == sorted(tokens for one in counted for tokens in one.fetches)
            assert sum_of.recent_s == pytest.approx(sum(one.recent_s for one in counted), abs=1e-9)


def test_what_is_not_told_again_fades() -> None:
    others = OthersLoads()
    others.hear([a_word("r", {A: Load(1, recent_s=8.0)})], 0.0)
    others.hear([a_word("r", {})], RECENT_S)
    assert others.columns[A].recent_s == pytest.approx(8.0 / math.e)

    others.hear([a_word("r", {A: Load(2, recent_s=8.0)})], RECENT_S)
    assert others.columns[A].recent_s == pytest.approx(8.0)


@dataclass
class Pen:
    """A router that has columns of its own and no requests."""

    columns: LoadColumns
    replicas: Replicas


def a_pen(index: EmbeddedServer, name: str, fleet: str) -> Pen:
    columns = LoadColumns()
    return Pen(columns, Replicas(RouterLoads(index.url, fleet, Incarnation.new(name)), own=lambda: columns))


@pytest.mark.parametrize("lost", ["nothing", "the server's memory", "an answer"])
async def test_only_changes_are_told_and_all_again_when_something_was_lost(
    index: EmbeddedServer, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = f"f{Incarnation.new('f').start_id}"
    one, other = a_pen(index, "one", fleet), a_pen(index, "other", fleet)
    for at in range(100):
        one.columns.add(Incarnation(f"n{at}", 1), requests=1)
    await one.replicas.exchange()
    await other.replicas.exchange()
    assert len(other.replicas.others()) == 100

    said: list[int] = []
    exchange = RouterLoads.exchange

    async def counted(self: RouterLoads, loads: Sequence[NodeLoad], *, is_whole: bool) -> list[Told] | None:
        said.append(len(loads))
        return await exchange(self, loads, is_whole=is_whole)

    async def ask_in_vain(command: Awaitable[Any]) -> Any:
        await command
        monkeypatch.setattr(router_loads, "ask", ask)
        raise UnavailableError("no answer in time")

    if lost == "an answer":
        monkeypatch.setattr(router_loads, "ask", ask_in_vain)
    monkeypatch.setattr(RouterLoads, "exchange", counted)
    one.columns.add(Incarnation("n7", 1), requests=4)
    one.columns.add(Incarnation("n8", 1), requests=-1)
    if lost == "the server's memory":
        await one.replicas._loads._redis.flushall()
    for _ in range(2):
        with suppress(UnavailableError):
            await one.replicas.exchange()
    assert said == {"nothing": [2, 0], "the server's memory": [2, 99, 0], "an answer": [2, 0, 99]}[lost]

    await other.replicas.exchange()
    heard = other.replicas.others()
    assert (heard[Incarnation("n7", 1)].requests, len(heard)) == (5, 99)
    for pen in (one, other):
        await pen.replicas.stop()


async def test_an_exchange_at_a_thousand_nodes_takes_what_its_changes_take(index: EmbeddedServer) -> None:
    fleet = f"f{Incarnation.new('f').start_id}"
    pens = [a_pen(index, name, fleet) for name in ("one", "other")]
    nodes = [Incarnation(f"n{at}", 1) for at in range(1500)]
    for pen in pens:
        for node in nodes:
            pen.columns.add(node, requests=1, tokens=100)
            pen.columns.put(node, 0.5)
        await pen.replicas.exchange()
    await pens[0].replicas.exchange()

    async def taken_s(num_changed: int) -> float:
        began_s = time.process_time()
        for turn in range(10):
            for pen in pens:
                for node in nodes[turn : turn + num_changed]:
                    pen.columns.add(node, requests=1)
                await pen.replicas.exchange()
        return (time.process_time() - began_s) / 20

    few_s, all_s = await taken_s(50), await taken_s(1400)
    assert few_s < all_s / 5
    assert few_s < 0.01  # it was 15 ms for all of them, on a quiet machine
    for pen in pens:
        await pen.replicas.stop()


def test_loads_of_routers_add_up() -> None:
    assert together({A: Load(1, 10, 2, (0.5,), 1.0)}, {A: Load(2, 5, 0, (0.1, 0.2), 0.5), B: Load(1)}) == {
        A: Load(3, 15, 2), B: Load(1),
    }  # fmt: skip
    some = Load(works_s=(0.5,), recent_s=1.0, fetches=(64,))
    summed = together({A: some}, {A: Load(works_s=(0.1,), recent_s=0.5, fetches=(9,))})[A]
    assert (summed.works_s, summed.recent_s, summed.fetches) == ((0.1, 0.5), 1.5, (64, 9))
