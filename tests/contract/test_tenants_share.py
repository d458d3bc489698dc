"""Tenants in front of one placer, and what a refused one hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from kvrelay.core.errors import QuotaError
from kvrelay.core.grpc_status import grpc_status
from kvrelay.core.types import Incarnation
from kvrelay.index.reader import PrefixReader
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.gate import Gate
from kvrelay.proto.server import connect, serve
from kvrelay.proto.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2
from kvrelay.router.admission import Slo, Terms
from kvrelay.router.app import Router
from kvrelay.router.fleet import FleetView
from kvrelay.router.peers import Placed
from kvrelay.router.placer import IndexPlacer
from kvrelay.router.tenants import Quota, Tenant, calling
from router_stage import PlayedPrefill, playing, until

RED, BLUE = Tenant("red"), Tenant("blue")
TERMS = Terms(Slo.BATCH, 600.0)


@asynccontextmanager
async def a_placer(index: EmbeddedServer, *, ahead_per_node: int) -> AsyncIterator[IndexPlacer]:
    fleet_name = f"f{Incarnation.new('f').start_id}"
    registry, reader = NodeRegistry(index.url, fleet_name), PrefixReader(index.url, fleet_name)
    for name, role in (("p", fleet_pb2.NODE_ROLE_PREFILL), ("d", fleet_pb2.NODE_ROLE_DECODE)):
        await registry.register(
            fleet_pb2.NodeRecord(
                node=convert.incarnation_to_pb(Incarnation(name, 1)), role=role, ring_size=1, layout_fingerprint=b"f",
                max_model_len=100_000, block_tokens=64, page_tokens=64, total_pages=10_000, free_pages=10_000,
            ), ttl_s=60,
        )  # fmt: skip
    fleet = FleetView(registry, refresh_s=60, put_aside_s=1, max_message_bytes=1 << 20, max_request_s=10)
    await fleet.start()
    yield IndexPlacer(fleet, reader, long_prompt_tokens=1 << 20, ahead_per_node=ahead_per_node)
    await fleet.stop()
    await reader.close()
    await registry.close()


async def place(placer: IndexPlacer, tenant: Tenant, order: list[tuple[str, Placed]], *, seed: int) -> None:
    calling.set(tenant)  # of this task only
    ids = np.random.default_rng(seed).integers(0, 1000, 500, dtype=np.int32)
    placed = await placer.place(token_ids=ids, max_tokens=9, needs_decode=True, avoid=frozenset(), terms=TERMS)
    order.append((tenant.name, placed))


async def at_least(count: int, order: list[tuple[str, Placed]]) -> None:
    while len(order) < count:  # noqa: ASYNC110 - many tasks lead there
        await asyncio.sleep(0.001)


async def test_a_tenant_that_floods_delays_another_by_what_is_on_the_nodes_only(index: EmbeddedServer) -> None:
    order: list[tuple[str, Placed]] = []
    async with a_placer(index, ahead_per_node=2) as placer, asyncio.TaskGroup() as tasks:
        for at in range(60):
            tasks.create_task(place(placer, RED, order, seed=at))
        await at_least(2, order)
        for at in range(5):
            tasks.create_task(place(placer, BLUE, order, seed=1000 + at))
        await asyncio.sleep(0.6)
        assert len(order) == 2  # no more than the nodes may have ahead
        for at in range(65):
            await at_least(at + 1, order)
            placer.computed(order[at][1])
            order[at][1].release()

    blue = [at for at, (tenant, _) in enumerate(order) if tenant == "blue"]
    assert blue[0] <= 4
    assert blue[-1] <= 2 + 2 * len(blue) + 1


async def test_a_request_that_is_cancelled_while_it_waits_takes_no_turn(index: EmbeddedServer) -> None:
    order: list[tuple[str, Placed]] = []
    async with a_placer(index, ahead_per_node=1) as placer:
        await place(placer, RED, order, seed=1)
        waiting = [asyncio.create_task(place(placer, BLUE, order, seed=at)) for at in range(2, 6)]
        await asyncio.sleep(0.2)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        order[0][1].release()
        async with asyncio.timeout(20):
            await place(placer, RED, order, seed=9)
        order[1][1].release()

        assert [tenant for tenant, _ in order] == ["red", "red"]
        assert not placer.own_loads()[Incarnation("p", 1)].requests


class OverQuota(fleet_pb2_grpc.FleetServicer):
    async def ListNodes(self, request: Any, context: Any) -> fleet_pb2.ListNodesReply:
        async with grpc_status(context):
            raise QuotaError("its quota max_requests is 2", retry_after_s=1.5)


async def test_who_is_over_quota_hears_which_one_and_when_to_come_back() -> None:
    def add(grpc_server: aio.Server) -> None:
        fleet_pb2_grpc.add_FleetServicer_to_server(OverQuota(), grpc_server)  # type: ignore[abstract]

    listening = await serve(listen="127.0.0.1:0", add_services=add, services=[], max_message_bytes=1 << 20)
    channel = connect(listening.endpoint, max_message_bytes=1 << 20)
    with pytest.raises(aio.AioRpcError, match="max_requests is 2") as caught:
        await fleet_pb2_grpc.FleetStub(channel).ListNodes(fleet_pb2.ListNodesRequest())
    await channel.close()
    await listening.stop(0)

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata() or ())["retry-after-ms"] == "1500"


# -- over gRPC, through a whole router


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids-only")
    (folder / "config.json").write_text('{"vocab_size": 256, "max_position_embeddings": 512, "eos_token_id": 255}')
    return folder


def all_calls_are_of(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the router's gate take every call for one of this tenant, without TLS and tokens."""

    def check(_: str, __: aio.ServicerContext[Any, Any]) -> None:
        calling.set(tenant)

    gate = Gate(check, on_refused=lambda _: None)
    monkeypatch.setattr(Router, "_security", lambda _: {"interceptors": (gate,)})


def a_request() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(packed_ids=convert.pack_ids([1] * 20)),
        sampling=common_pb2.Sampling(max_tokens=4),
    )


async def test_a_tenants_quota_holds_for_its_calls_and_ends_with_them(
    index: EmbeddedServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_calls_are_of(Tenant("red", quota=Quota(max_requests=1)), monkeypatch)
    async with playing(index, model, prefill=PlayedPrefill(silent_s=1.0)) as stage:
        first = asyncio.create_task(stage.run(a_request()))
        await until(lambda: stage.prefill.calls)
        with pytest.raises(aio.AioRpcError, match="'red' has 1 requests in work, its quota max_requests") as caught:
            await stage.run(a_request())
        await first
        cancelled = asyncio.create_task(stage.run(a_request()))
        await until(lambda: len(stage.prefill.calls) == 2)
        cancelled.cancel()
        await until(lambda: stage.router.inference.num_active == 0)

        assert (await stage.run(a_request()))[-1].HasField("finished")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(caught.value.trailing_metadata() or ())["retry-after-ms"]) > 0


async def test_a_quota_of_tokens_counts_prompts_and_answers(
    index: EmbeddedServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_calls_are_of(Tenant("red", quota=Quota(tokens_per_minute=60)), monkeypatch)
    async with playing(index, model) as stage:
        for _ in range(2):
            await stage.run(a_request())
        code, text = await stage.fails(a_request())

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "asks for 24 tokens" in text
    assert "tokens_per_minute is 60" in text
