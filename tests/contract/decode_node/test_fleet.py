"""A decode node in its fleet: drain, registry, health, a lost index server."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_lab import (
    GREEDY,
    ORACLE,
    Lab,
    read,
    refused,
    running,
    running_stream,
    says_retry,
)
from kvrelay.core.errors import UnavailableError
from kvrelay.index.registry import NodeRegistry
from kvrelay.model.transformer import Model
from kvrelay.proto import convert
from kvrelay.proto.v1 import blocks_pb2, common_pb2, fleet_pb2
from oracle_data import MAX_MODEL_LEN, recording


async def test_a_draining_node_refuses_new_requests_and_finishes_the_others(lab: Lab) -> None:
    _, call = await running_stream(lab, recording(ORACLE, 64).prompt)
    reply = await lab.stub.Drain(common_pb2.DrainRequest())
    assert reply.active_requests == 1
    await asyncio.wait_for(lab.asked.wait(), 20)
    drained = asyncio.create_task(lab.server.drained())
    await asyncio.sleep(0.05)
    err = await refused(lab.stub.Reserve(lab.request([1], GREEDY)))
    assert (err.code(), says_retry(err)) == (grpc.StatusCode.UNAVAILABLE, True)
    assert "draining" in str(err.details())
    err = await refused(lab.blocks.Push(blocks_pb2.PushRequest()))  # else others could hold up the drain for ever
    assert (err.code(), says_retry(err)) == (grpc.StatusCode.UNAVAILABLE, True)
    assert (await lab.stats()).draining
    seen = await read(call)
    assert seen.done is not None
    assert seen.done.num_tokens == 399
    await asyncio.wait_for(drained, 20)


async def test_a_node_that_leaves_tells_the_registry_before_it_refuses(model: Model, index_url: str) -> None:
    async with running(model, index_url, fleet="leaving", heartbeat_s=5.0, lame_duck_s=1.5) as lab:
        registry = NodeRegistry(index_url, "leaving")
        drained = asyncio.create_task(lab.server.drained())
        async with asyncio.timeout(20):
            while [record.draining for record in await registry.nodes()] != [True]:  # noqa: ASYNC110 - another's record
                await asyncio.sleep(0.02)

        ticket = await lab.reserve([1], GREEDY)
        await asyncio.sleep(1.5)
        await refused(lab.stub.Reserve(lab.request([1], GREEDY)))
        await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request))
        await asyncio.wait_for(drained, 20)
        await registry.close()


async def test_the_registry_shows_the_node_its_load_and_that_it_drains(model: Model, index_url: str) -> None:
    async with running(model, index_url, fleet="shown", heartbeat_s=0.1) as lab:
        registry = NodeRegistry(index_url, "shown")

        async def record() -> fleet_pb2.NodeRecord:
            (found,) = await registry.nodes()
            return found

        shown = await record()
        assert convert.incarnation_from_pb(shown.node) == lab.server.node.incarnation
        assert (shown.role, shown.ring_size, shown.endpoint) == (fleet_pb2.NODE_ROLE_DECODE, 1, lab.server.endpoint)
        assert (shown.total_pages, shown.free_pages, shown.max_model_len) == (300, 300, MAX_MODEL_LEN)
        assert shown.layout_fingerprint == lab.prefill.pool.layout.fingerprint
        ticket = await lab.reserve([1] * 100, GREEDY)
        async with asyncio.timeout(20):
            while ((one := await record()).active_requests, one.free_pages) != (1, 298):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request))
            await lab.server.drained()
            while not (await record()).draining:  # noqa: ASYNC110 - another's record
                await asyncio.sleep(0.05)
        await registry.close()


async def test_a_node_whose_step_is_stuck_is_not_serving_and_cannot_be_found(
    model: Model, index_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model, index_url, fleet="stuck", heartbeat_s=0.2, stuck_after_s=0.5) as lab:
        channel = aio.insecure_channel(lab.server.endpoint)
        health = health_pb2_grpc.HealthStub(channel)
        registry = NodeRegistry(index_url, "stuck")

        async def seen() -> tuple[int, int]:
            answer = await health.Check(health_pb2.HealthCheckRequest())
            return answer.status, len(await registry.nodes())

        async def becomes(status: health_pb2.HealthCheckResponse.ServingStatus.ValueType, num_nodes: int) -> None:
            async with asyncio.timeout(20):
                while await seen() != (status, num_nodes):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        serving = health_pb2.HealthCheckResponse.SERVING
        await becomes(serving, 1)
        step, go_on = lab.server.engine.step, threading.Event()

        def slow(*args: Any, **how: Any) -> Any:
            go_on.wait(20)
            return step(*args, **how)

        monkeypatch.setattr(lab.server.engine, "step", slow)
        prompt = recording(ORACLE, 64).prompt
        generating = asyncio.create_task(lab.generate(prompt, GREEDY))
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING, 0)
        go_on.set()
        await becomes(serving, 1)
        assert (await generating).token_ids == recording(ORACLE, 64).greedy
        await channel.close()
        await registry.close()


async def test_a_node_without_its_index_server_goes_on(model: Model) -> None:
    async with running(model, "redis://127.0.0.1:1/0") as lab:
        wanted = recording(ORACLE, 64)
        assert (await lab.generate(wanted.prompt, GREEDY)).token_ids == wanted.greedy
        with pytest.raises(UnavailableError):
            await NodeRegistry("redis://127.0.0.1:1/0", "default").nodes()
