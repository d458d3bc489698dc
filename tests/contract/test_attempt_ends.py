"""Whatever the end of an attempt, what it had on its way counts for nobody; and work counts where it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvrelay.core import prefix_hash
from kvrelay.core.clock import ManualClock
from kvrelay.core.errors import CapacityError, ServeError, UnavailableError
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.reader import PrefixReader
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.server import EmbeddedServer
from kvrelay.index.writer import PrefixWriter
from kvrelay.proto import convert
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.decisions import Decision
from kvrelay.router.fleet import FleetView
from kvrelay.router.orchestrate import Orchestrator
from kvrelay.router.peers import Placed
from kvrelay.router.placer import NO_PULL_S, IndexPlacer
from orchestrate_stage import ANSWER, PlayedDecode, PlayedNode, PlayedPrefill, Stage, playing, run, tokens_of
from router_stage import until

BLOCK = 16
PROMPT = np.arange(100, dtype=np.int32)  # what `run` asks for
LAYOUT = b"layout"
HASHES = prefix_hash.chain(prefix_hash.seed(fingerprint=LAYOUT), PROMPT, block_tokens=BLOCK)


@dataclass
class PlacedStage(Stage):
    """Requests are placed by the router's own placer; `before` are the tokens that each placement found on its way,
    `fetches` what was being fetched before and behind each."""

    placer: IndexPlacer | None = None
    before: list[int] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)
    fetches: list[list[int]] = field(default_factory=list)

    async def place(self, **asked: Any) -> Placed:
        assert self.placer is not None
        self.before.append(await self.on_the_way())
        self.fetches.append(self.in_flight())
        placed = await self.placer.place(**asked)
        self.fetches.append(self.in_flight())
        self.placed += 1
        return replace(placed, release=lambda: self._ended(placed))

    def _ended(self, placed: Placed) -> None:
        self._release()
        placed.release()

    async def asked(self) -> Decision:
        """Return where the prompt would go now."""
        assert self.placer is not None
        return await self.placer.preview(token_ids=PROMPT, max_tokens=6)

    async def on_the_way(self) -> int:
        """Return how much of the prompt the next request would find on some node."""
        return max(one.cached_tokens for one in (await self.asked()).candidates)

    def in_flight(self) -> list[int]:
        """Return the tokens of all fetches that the router takes to be in flight."""
        assert self.placer is not None
        return [tokens for load in self.placer.own_loads().values() for tokens in load.fetches]

    def load(self, node: PlayedNode) -> tuple[int, int]:
        """Return (requests, tokens to compute) that the router has on a node."""
        assert self.placer is not None
        load = self.placer.own_loads().get(node.incarnation)
        return (0, 0) if load is None else (load.requests, load.tokens)


@asynccontextmanager
async def placing(
    stage: PlacedStage, index: EmbeddedServer, *, held_by_decode: Sequence[bytes] = (), **changes: Any
) -> AsyncIterator[Orchestrator]:
    """`held_by_decode`: blocks that the first decode node has; `changes`: of all records."""
    name = f"f{Incarnation.new('f').start_id}"
    registry, reader = NodeRegistry(index.url, name), PrefixReader(index.url, name)
    writers: list[PrefixWriter] = []
    async with playing(stage, lease_s=0.3) as orchestrator:
        for role, nodes in ((Role.PREFILL, stage.prefill_nodes), (Role.DECODE, stage.decode_nodes)):
            for node in nodes:
                is_prefill = role is Role.PREFILL
                record = fleet_pb2.NodeRecord(
                    node=convert.incarnation_to_pb(node.incarnation), endpoint=node.endpoint, ring_size=1,
                    role=fleet_pb2.NODE_ROLE_PREFILL if is_prefill else fleet_pb2.NODE_ROLE_DECODE,
                    layout_fingerprint=LAYOUT, max_model_len=100_000, block_tokens=BLOCK, page_tokens=BLOCK,
                    total_pages=10_000, free_pages=10_000,
                    cost=fleet_pb2.NodeCost(token_s=1e-3, observations=100) if is_prefill else None,
                )  # fmt: skip
                record.MergeFrom(fleet_pb2.NodeRecord(**changes))
                await registry.register(record, ttl_s=60)
                held = list(held_by_decode) if node is stage.decode_nodes[0] else []
                writer = PrefixWriter(index.url, name, node=node.incarnation, role=role, all_hashes=lambda h=held: h)  # type: ignore[misc]
                await writer.start()
                writer.publish(held)
                writers.append(writer)
        fleet = FleetView(registry, refresh_s=60, put_aside_s=0.0, max_message_bytes=1 << 20, max_request_s=10)
        await fleet.start()
        stage.placer = IndexPlacer(fleet, reader, long_prompt_tokens=1 << 20, clock=stage.clock)
        async with asyncio.timeout(10):
            while held_by_decode and not await stage.on_the_way():  # noqa: ASYNC110 - a writer's task publishes
                await asyncio.sleep(0.01)
        yield orchestrator
        for writer in writers:
            await writer.stop()
        await fleet.stop()
        await reader.close()
        await registry.close()


def refusing(why: type[ServeError]) -> Callable[[], ServeError]:
    return lambda: why("not now")


ENDS = {
    "decode refuses": lambda: ([PlayedPrefill()], [PlayedDecode(refuse=refusing(CapacityError)), PlayedDecode()]),
    "prefill refuses": lambda: ([PlayedPrefill(fail=refusing(CapacityError)), PlayedPrefill()], [PlayedDecode()]),
    "prefill dies": lambda: ([PlayedPrefill(fail=refusing(UnavailableError)), PlayedPrefill()], [PlayedDecode()]),
    "prefill forgets": lambda: ([PlayedPrefill(hang=True, knows=False), PlayedPrefill()], [PlayedDecode()]),
    "prefill forgets, fetching": lambda: (
        [PlayedPrefill(fetches_for_ever=True, knows=False), PlayedPrefill()],
        [PlayedDecode()],
    ),
    "decode dies": lambda: ([PlayedPrefill()], [PlayedDecode(die_after=3), PlayedDecode()]),
    "nothing fails": lambda: ([PlayedPrefill()], [PlayedDecode()]),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_retry_finds_nothing_of_the_attempt_before_it_and_the_next_request_nothing_of_either(
    end: str, index: EmbeddedServer
) -> None:
    stage = PlacedStage(*ENDS[end]())
    async with placing(stage, index) as orchestrator:
        events, _ = await run(orchestrator)
        after = await stage.on_the_way()

    assert tokens_of(events) == ANSWER
    assert stage.before == [0] * (1 if end == "nothing fails" else 2)
    assert after == 0
    assert {stage.load(node) for node in (*stage.prefill_nodes, *stage.decode_nodes)} == {(0, 0)}


@pytest.mark.parametrize("end", [*ENDS, "cancelled", "deadline", "no node left"])
async def test_no_fetch_counts_as_in_flight_behind_the_attempt_that_waited_for_it(
    end: str, index: EmbeddedServer
) -> None:
    fail = refusing(UnavailableError) if end == "no node left" else None
    hanging = [PlayedPrefill(fail=fail, fetches_for_ever=True)], [PlayedDecode()]
    stage = PlacedStage(*(ENDS[end]() if end in ENDS else hanging))
    async with placing(stage, index, held_by_decode=HASHES, pulls=True) as orchestrator:
        task = asyncio.create_task(run(orchestrator, timeout_s=0.5 if end == "deadline" else 20.0))
        if end == "cancelled":
            await asyncio.wait_for(stage.prefill[0].called.wait(), 10)
            task.cancel()
        with suppress(ServeError, asyncio.CancelledError):
            await task

        assert stage.fetches[1] == [len(HASHES) * BLOCK]
        assert not any([*stage.fetches[::2], stage.in_flight()])


@pytest.mark.parametrize("end", ["cancelled", "deadline", "no node left"])
async def test_a_request_that_fails_for_good_leaves_nothing(end: str, index: EmbeddedServer) -> None:
    fail = refusing(UnavailableError) if end == "no node left" else None
    stage = PlacedStage([PlayedPrefill(hang=True, fail=fail)], [PlayedDecode()])
    async with placing(stage, index) as orchestrator:
        task = asyncio.create_task(run(orchestrator, timeout_s=0.5 if end == "deadline" else 20.0))
        await asyncio.wait_for(stage.prefill[0].called.wait(), 10)
        if fail is None:
            assert await stage.on_the_way() == len(HASHES) * BLOCK
        if end == "cancelled":
            task.cancel()
        with suppress(ServeError, asyncio.CancelledError):
            await task
        after = await stage.on_the_way()

    assert after == 0
    assert stage.load(stage.prefill_nodes[0]) == stage.load(stage.decode_nodes[0]) == (0, 0)


async def test_what_a_decode_node_declines_to_complete_is_work_of_the_prefill_node(index: EmbeddedServer) -> None:
    stage = PlacedStage([PlayedPrefill(hang=True)], [PlayedDecode(computes=False)])
    async with placing(stage, index, held_by_decode=HASHES, local_tokens=256) as orchestrator:
        task = asyncio.create_task(run(orchestrator))
        await asyncio.wait_for(stage.prefill[0].called.wait(), 10)
        loads = stage.load(stage.prefill_nodes[0]), stage.load(stage.decode_nodes[0])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert stage.decode[0].reserved[0].may_compute
    assert loads == ((1, 100), (1, 0))


async def test_a_fetch_that_brings_nothing_is_work_of_the_prefill_node_and_not_tried_again_at_once(
    index: EmbeddedServer,
) -> None:
    stage = PlacedStage([PlayedPrefill(hang=True)], [PlayedDecode()])
    async with placing(stage, index, held_by_decode=HASHES, pulls=True) as orchestrator:
        task = asyncio.create_task(run(orchestrator))
        await until(lambda: stage.load(stage.prefill_nodes[0]) == (1, 100))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        ways = []
        for passed_s in (0.0, NO_PULL_S + 1.0):
            stage.clock.advance(passed_s)
            ways.append((await stage.asked()).way)

    assert stage.prefill[0].calls[0].pull_from.tokens == len(HASHES) * BLOCK
    assert ["pull from" in way for way in ways] == [False, True], ways
