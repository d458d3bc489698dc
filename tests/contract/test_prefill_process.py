"""A prefill node as a process: what happens when one of its ranks, its step or its supervisor ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import grpc
import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import warm_start
from contract.prefill_process import (
    Client,
    nodes_of,
    prefill_node,
)
from contract.prefill_requests import (
    MODEL,
    NEEDS_RECORDING,
    a_ref,
    events_of,
    kinds,
    recorded,
    some_prompt,
    status_of,
)
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto.v1 import blocks_pb2
from oracle_data import FOLDER
from warm_start import children

pytestmark = NEEDS_RECORDING


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
async def test_a_ring_that_loses_a_rank_leaves_as_a_whole(index: EmbeddedServer, how: str) -> None:
    options = ("--group-timeout-s", "3")
    with prefill_node(FOLDER / MODEL, *options, ring_size=3, index_url=index.url, name=f"ring-{how}") as started:
        ranks = children(psutil.Process(started.process.pid))
        assert len(ranks) == 2
        victim = ranks[1]
        try:
            os.kill(victim.pid, getattr(signal, how))
            begun = time.monotonic()
            status = await asyncio.to_thread(started.process.wait, 30)
            assert status != 0
            assert time.monotonic() - begun < 3 + 10  # what noticing takes, and ending
        finally:
            if victim.is_running():
                victim.kill()
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert alive == []


def test_a_rank_that_still_loads_ends_with_rank_0() -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "prefill", "--model", str(FOLDER / MODEL), "--ring-size", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", warm_start.COLD_VARIABLE: "1"}  # as users start it
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 60
        while not (ranks := psutil.Process(process.pid).children()) and time.monotonic() < until_s:
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()

    [rank] = ranks
    until_s = time.monotonic() + 1.0  # while torch alone takes longer to load
    while (runs := rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not runs


@pytest.mark.full
async def test_a_node_whose_step_does_not_move_is_not_serving_until_it_does(index: EmbeddedServer) -> None:
    options = ("--group-timeout-s", "40", "--lease-s", "60")
    with prefill_node(FOLDER / MODEL, *options, ring_size=2, index_url=index.url, name="stalls") as started:
        client = Client(started)
        health = health_pb2_grpc.HealthStub(aio.insecure_channel(started.endpoint))

        async def becomes(status: int, *, within_s: float) -> None:
            async with asyncio.timeout(within_s):
                while (await health.Check(health_pb2.HealthCheckRequest())).status != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        (rank,) = children(psutil.Process(started.process.pid))
        rank.suspend()
        call = asyncio.create_task(events_of(client.prefill(a_ref(), some_prompt(300))))
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING, within_s=30)

        rank.resume()

        await becomes(health_pb2.HealthCheckResponse.SERVING, within_s=20)
        assert kinds(await call)[-1] == "done"
        await client.close()


async def test_a_drained_node_finishes_its_work_and_exits_with_status_0(index: EmbeddedServer) -> None:
    with prefill_node(
        FOLDER / MODEL, "--chunk-tokens", "32", ring_size=2, index_url=index.url, name="leaves"
    ) as started:
        client = Client(started)
        call = client.prefill(a_ref(), recorded()["prompt_1500"].tolist())
        stream = aiter(call)
        await anext(stream)

        started.process.terminate()
        await asyncio.sleep(0.2)
        late = client.prefill(a_ref(), some_prompt(10))
        code, _ = await status_of(late)
        with pytest.raises(aio.AioRpcError, match="leaves is draining"):
            await client.blocks.Push(blocks_pb2.PushRequest())
        events = [event async for event in stream]

        assert code is grpc.StatusCode.UNAVAILABLE
        assert events[-2].first_token.token.token_id == recorded()["greedy_1500"][0]
        assert await asyncio.to_thread(started.process.wait, 30) == 0
        await client.close()
    assert [one.node.name for one in await asyncio.to_thread(nodes_of, index.url) if one.node.name == "leaves"] == []
