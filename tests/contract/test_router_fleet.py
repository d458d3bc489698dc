"""What a router tells operators, over real gRPC."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from kvrelay.index.client import connect
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.leases import LeaseKeeper
from router_stage import Stage, _record, asked, model_of_bytes, playing, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(tmp_path_factory.mktemp("bytes"))


async def test_a_drained_node_gets_nothing_any_more(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        listed = await stage.fleet.ListNodes(fleet_pb2.ListNodesRequest())
        reply = await stage.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name="prefill"))
        code, text = await stage.fails(asked(), timeout=20)
        with pytest.raises(aio.AioRpcError, match="nobody"):
            await stage.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name="nobody"))
        unknown_role = fleet_pb2.DrainNodeRequest.FromString(b"\n\6decode\x10\7")
        with pytest.raises(aio.AioRpcError, match="next_role is 7; it must be one of"):
            await stage.fleet.DrainNode(unknown_role)

    assert {record.node.name for record in listed.nodes} == {"prefill", "decode"}
    assert (reply.active_requests, stage.prefill.drained) == (7, 1)
    assert (code, "no prefill node" in text) == (grpc.StatusCode.UNAVAILABLE, True)


@pytest.mark.parametrize(
    ("name", "next_role", "missing"),
    [
        ("decode", fleet_pb2.NODE_ROLE_UNSPECIFIED, "no decode node takes requests"),
        ("decode", fleet_pb2.NODE_ROLE_PREFILL, "no decode node takes requests"),
        ("prefill", fleet_pb2.NODE_ROLE_DECODE, "no prefill node takes requests"),
        ("spare", fleet_pb2.NODE_ROLE_DECODE, ""),
    ],
)
async def test_who_drains_or_moves_a_node_is_told_what_the_fleet_then_lacks(
    index: EmbeddedServer, model: Path, name: str, next_role: fleet_pb2.NodeRole.ValueType, missing: str
) -> None:
    async with playing(index, model) as stage:
        if name == "spare":
            spare = _record(name, fleet_pb2.NODE_ROLE_PREFILL, stage.records[0].endpoint)
            await stage.registry.register(spare, ttl_s=60)
            await until(lambda: len(stage.router.fleet.nodes()) == 3)
        reply = await stage.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name=name, next_role=next_role))

    assert reply.missing == missing


async def test_the_command_line_says_so_too(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        words = [sys.executable, "-m", "kvrelay.cli.main", "role", "decode", "prefill", "--endpoint", stage.endpoint]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()

    assert process.returncode == 0
    assert out == b"decode is draining to become a prefill node, 7 requests to finish\n"
    assert err == b"afterwards no decode node takes requests: every request ends as UNAVAILABLE until that changes\n"


async def test_only_a_name_that_is_or_was_a_nodes_can_be_fenced(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        running = await stage.fleet.FenceNode(fleet_pb2.FenceNodeRequest(name="prefill"))
        with pytest.raises(aio.AioRpcError) as unknown:
            await stage.fleet.FenceNode(fleet_pb2.FenceNodeRequest(name="prefil"))
        await stage.registry.withdraw(convert.incarnation_from_pb(stage.records[0].node))
        await until(lambda: len(stage.router.fleet.nodes()) == 1)
        gone = await stage.fleet.FenceNode(fleet_pb2.FenceNodeRequest(name="prefill"))
        stage.decode.kept_from["elder"] = 3  # from a time before this router's
        kept = await stage.fleet.FenceNode(fleet_pb2.FenceNodeRequest(name="elder"))

    assert unknown.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (unknown.value.details() or "").endswith("known: decode, prefill")
    assert [list(reply.told) for reply in (running, gone, kept)] == [["decode"]] * 3
    assert kept.pages == 3


async def test_a_node_that_could_not_be_told_to_drain_goes_on_to_serve(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        await stage.registry.register(_record("deaf", fleet_pb2.NODE_ROLE_DECODE, "127.0.0.1:1"), ttl_s=60)
        await until(lambda: len(stage.router.fleet.nodes()) == 3)
        with pytest.raises(aio.AioRpcError) as caught:
            await stage.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name="deaf"))

        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(stage.router.fleet.nodes()) == 3


async def test_a_request_can_be_explained_and_one_that_was_never_placed_cannot(
    index: EmbeddedServer, model: Path
) -> None:
    async with playing(index, model) as stage:
        await stage.registry.register(
            _record("small", fleet_pb2.NODE_ROLE_DECODE, "127.0.0.1:1", total_pages=0), ttl_s=60
        )
        await until(lambda: len(stage.router.fleet.nodes()) == 3)
        events = await stage.run(asked())
        why = await stage.fleet.Explain(fleet_pb2.ExplainRequest(request_id=events[0].accepted.request_id))
        with pytest.raises(aio.AioRpcError) as caught:
            await stage.fleet.Explain(fleet_pb2.ExplainRequest(request_id="nobody"))

    assert {(one.node, one.verdict) for one in why.candidates} == {("prefill", "chosen"), ("decode", "chosen")}
    assert all(one.total_s == pytest.approx(sum(one.parts_s.values())) for one in why.candidates)
    assert dict(why.refused) == {"small": "has 0 pages, the request needs 1"}
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_preview_says_where_a_prompt_would_go_and_places_nothing(index: EmbeddedServer, model: Path) -> None:
    asking = fleet_pb2.PreviewRequest(packed_ids=convert.pack_ids([1] * 200), max_tokens=8)
    async with playing(index, model) as stage:
        said = await stage.fleet.Preview(asking)
        with pytest.raises(aio.AioRpcError, match="no request") as caught:
            await stage.fleet.Preview(fleet_pb2.PreviewRequest(packed_ids=b"", max_tokens=8))

        assert {(one.node, one.verdict) for one in said.candidates} == {("prefill", "chosen"), ("decode", "chosen")}
        assert (said.prompt_tokens, stage.decode.reserved, stage.prefill.calls) == (200, [], [])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_top_shows_what_a_router_serves_and_its_nodes(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        for _ in range(3):
            await stage.run(asked())
        traffic = await stage.fleet.Traffic(fleet_pb2.TrafficRequest())
        assert (dict(traffic.requests), traffic.output_tokens, sum(traffic.ttft.counts)) == ({"ok": 3}, 24, 3)
        assert traffic.router == convert.incarnation_to_pb(stage.router.id)
        words = [sys.executable, "-m", "kvrelay.cli.main", "top", "--endpoint", stage.endpoint]
        process = await asyncio.create_subprocess_exec(
            *words, "--frames", "2", "--interval-s", "0.1", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()

    assert process.returncode == 0
    lines = out.decode().splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("prefill ", "decode "))] == [
        ["prefill", "prefill"],
        ["decode", "decode"],
    ] * 2


async def test_a_registry_that_loses_everything_stops_no_request_and_one_node_that_is_back_hides_no_other(
    model: Path,
) -> None:
    server = EmbeddedServer.start()
    try:
        async with playing(server, model) as stage:
            redis = connect(server.url, timeout_s=5.0)
            await stage.run(asked())
            await redis.flushall()
            await stage.router.fleet.refresh()
            emptied = await stage.run(asked())
            await stage.registry.heartbeat(stage.records[0], ttl_s=60)
            await stage.router.fleet.refresh()
            halved = await stage.run(asked())
            await stage.registry.heartbeat(stage.records[1], ttl_s=60)
            await stage.registry.withdraw(convert.incarnation_from_pb(stage.records[1].node))
            await stage.router.fleet.refresh()
            await redis.aclose()

        assert emptied[-1].HasField("finished")
        assert halved[-1].HasField("finished")
    finally:
        server.stop()


async def test_a_router_whose_lease_thread_hangs_is_not_serving_until_it_moves_again(
    index: EmbeddedServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(LeaseKeeper, "_renew_all", lambda keeper: goes_on.wait(30))
    async with playing(index, model, stuck_after_s=0.2) as stage:
        before = await stage.health()
        await until_health(stage, health_pb2.HealthCheckResponse.NOT_SERVING)
        goes_on.set()
        await until_health(stage, health_pb2.HealthCheckResponse.SERVING)

    assert before == health_pb2.HealthCheckResponse.SERVING


async def until_health(stage: Stage, wanted: int) -> None:
    async with asyncio.timeout(10):
        while await stage.health() != wanted:  # noqa: ASYNC110 - health is asked for, it does not call
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("name", ["e" * 1_000_000, "ä" * 500_000], ids=["ascii", "percent-encoded"])
async def test_an_error_that_quotes_a_huge_name_keeps_its_status(index: EmbeddedServer, model: Path, name: str) -> None:
    async with playing(index, model) as stage:
        with pytest.raises(aio.AioRpcError) as unknown_request:
            await stage.fleet.Explain(fleet_pb2.ExplainRequest(request_id=name))
        with pytest.raises(aio.AioRpcError) as unknown_node:
            await stage.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name=name))

    told = unknown_request.value, unknown_node.value
    assert [one.code() for one in told] == [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT]
    assert (told[1].details() or "").endswith("known: decode, prefill")


async def test_a_draining_node_that_has_the_role_already_says_that_it_drains(
    index: EmbeddedServer, model: Path
) -> None:
    async with playing(index, model) as stage:
        await stage.fleet.DrainNode(fleet_pb2.DrainNodeRequest(name="prefill"))
        with pytest.raises(aio.AioRpcError, match="prefill node already; it is draining"):
            await stage.fleet.DrainNode(
                fleet_pb2.DrainNodeRequest(name="prefill", next_role=fleet_pb2.NODE_ROLE_PREFILL)
            )
