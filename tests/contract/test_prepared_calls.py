"""Calls to a prefill node that are open before there are requests: each serves one, in all respects like any other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from contract.prefill_process import Client, NodeProcess, prefill_node
from contract.prefill_requests import CHUNK, MODEL, NEEDS_RECORDING, a_ref, events_of, kinds, some_prompt, status_of
from kvrelay.core.clock import Deadline
from kvrelay.core.tracing import Trace
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert, server
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import prefill_pb2, prefill_pb2_grpc
from kvrelay.router.prepared import Prepared, PromptCall
from oracle_data import FOLDER
from router_stage import ANSWER, MAX_BYTES, Stage, asked, ids, model_of_bytes, playing, until

# ---- a node ----


@pytest.fixture(scope="module")
def node(index: EmbeddedServer) -> Iterator[NodeProcess]:
    options = ("--chunk-tokens", str(CHUNK), "--lease-s", "3")
    with prefill_node(FOLDER / MODEL, *options, ring_size=1, index_url=index.url, name="prepared") as started:
        yield started


@NEEDS_RECORDING
async def test_a_prompt_on_an_open_call_is_answered_like_any_other(client: Client) -> None:
    assert client.node.record.takes_prepared_calls
    call: Any = client.stub.PreparedPrefill()
    await client.stats()  # the node has it by now
    await call.write(client.request(a_ref(), some_prompt(300), timeout_ms=60_000))

    assert kinds(await events_of(call)) == kinds(await events_of(client.prefill(a_ref(), some_prompt(300))))
    assert await call.code() is grpc.StatusCode.OK
    await client.settled()


@NEEDS_RECORDING
async def test_its_time_limit_is_that_of_the_request_and_its_end_is_the_requests_end(client: Client) -> None:
    late: Any = client.stub.PreparedPrefill()
    await late.write(client.request(a_ref(), some_prompt(1800), timeout_ms=1))
    assert (await status_of(late))[0] is grpc.StatusCode.DEADLINE_EXCEEDED

    wrong: Any = client.stub.PreparedPrefill()
    await wrong.write(client.request(a_ref(), [1 << 20]))
    assert (await status_of(wrong))[0] is grpc.StatusCode.INVALID_ARGUMENT

    left: Any = client.stub.PreparedPrefill()
    await left.write(client.request(a_ref(), some_prompt(1800)))
    async for event in left:
        if event.WhichOneof("event") == "started":
            break
    left.cancel()

    unused: Any = client.stub.PreparedPrefill()
    await unused.done_writing()
    assert await events_of(unused) == []
    await client.settled()


@NEEDS_RECORDING
async def test_a_node_that_drains_ends_the_calls_that_wait_as_if_nothing_had_happened(index: EmbeddedServer) -> None:
    with prefill_node(FOLDER / MODEL, ring_size=1, index_url=index.url, name="drained") as node:
        client = Client(node)
        calls: list[Any] = [client.stub.PreparedPrefill() for _ in range(3)]
        await client.stats()
        node.process.terminate()

        assert [await events_of(call) for call in calls] == [[], [], []]
        assert {await call.code() for call in calls} == {grpc.StatusCode.OK}
        await client.close()
        assert await asyncio.to_thread(node.process.wait, 20) == 0


@NEEDS_RECORDING
async def test_a_node_that_stands_still_keeps_no_call_for_long(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepalive = tuple((name, number // 10) for name, number in server._KEEPALIVE)
    monkeypatch.setattr(server, "_KEEPALIVE", keepalive)
    client = Client(node)
    call: Any = client.stub.PreparedPrefill()
    await client.stats()
    node.process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(6):  # of a second and another
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        node.process.send_signal(signal.SIGCONT)
        await client.close()


@NEEDS_RECORDING
@pytest.mark.parametrize("end", ["drains", "dies"])
async def test_a_node_that_ends_unheard_is_unavailable_and_not_our_bug(index: EmbeddedServer, end: str) -> None:
    with prefill_node(FOLDER / MODEL, ring_size=1, index_url=index.url, name=end) as node:
        client = Client(node)
        prepared = Prepared(client.stub)
        prepared.prepare()
        await client.stats()
        (node.process.terminate if end == "drains" else node.process.kill)()
        node.process.wait(20)  # and this loop stands still meanwhile, as a busy router's does
        taken = prepared.take()
        assert taken is not None
        request = client.request(a_ref(), some_prompt(300))
        call = PromptCall(taken, request, deadline=Deadline.after(60), anew=lambda: client.stub.Prefill(request))

        assert (await status_of(call))[0] is grpc.StatusCode.UNAVAILABLE
        await client.close()


# ---- a router ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(tmp_path_factory.mktemp("bytes"))


async def a_waiting_call(stage: Stage) -> None:
    await until(lambda: stage.prefill.prepared.num_waiting == 1)


async def test_from_the_second_request_on_a_prompt_finds_its_call_open(index: EmbeddedServer, model: Path) -> None:
    trace = Trace.new()
    async with playing(index, model) as stage:
        for number in range(4):
            answer = await stage.run(asked(), timeout=60, metadata=(("traceparent", trace.header),))
            assert ids(answer) == ANSWER[:8]
            assert stage.prefill.num_prepared == number
            await a_waiting_call(stage)
        requests = stage.prefill.calls
        assert stage.prefill.prepared.num_waiting == 1  # one, however many there were
        assert not stage.prefill.aborted

    assert requests[0].timeout_ms == 0
    assert all(45_000 < one.timeout_ms < 65_000 for one in requests[1:])  # gRPC rounds
    parents = [Trace.parse(one.traceparent) for one in requests[1:]]
    assert {one.trace_id for one in parents if one is not None} == {trace.trace_id}


async def test_requests_that_come_together_do_not_wait_for_each_others_call(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        await stage.run(asked())
        await a_waiting_call(stage)
        answers = await asyncio.gather(*(stage.run(asked()) for _ in range(5)))

    assert [ids(answer) for answer in answers] == [ANSWER[:8]] * 5
    assert 1 <= stage.prefill.num_prepared <= 5


async def test_a_node_that_has_ended_the_call_is_called_anew(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        await stage.run(asked())
        await a_waiting_call(stage)
        stage.prefill.prepared.end()
        await until(lambda: stage.prefill.prepared.num_waiting == 0)
        assert ids(await stage.run(asked())) == ANSWER[:8]

    assert stage.prefill.num_prepared == 0
    assert [one.request.attempt for one in stage.prefill.calls] == [1, 1]  # which is no failed attempt


async def test_a_call_that_ends_just_when_it_is_taken_is_made_anew(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        channel = connect(stage.records[0].endpoint, max_message_bytes=MAX_BYTES)
        stub: prefill_pb2_grpc.PrefillNodeAsyncStub = prefill_pb2_grpc.PrefillNodeStub(channel)
        prepared = Prepared(stub)
        prepared.prepare()
        await a_waiting_call(stage)
        taken = prepared.take()
        assert taken is not None
        stage.prefill.prepared.end()
        await taken.code()
        request = prefill_pb2.PrefillRequest(packed_ids=b"1234")
        request.sampling.max_tokens = 1
        call = PromptCall(taken, request, deadline=Deadline.after(60), anew=lambda: stub.Prefill(request))

        assert kinds([event async for event in call]) == ["started", "progress", "first_token", "done"]
        assert prepared.take() is None
        await channel.close()


async def test_a_request_that_the_node_ends_unread_is_sent_anew(
    index: EmbeddedServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drains_just_then(context: Any) -> None:
        await context.read()

    async with playing(index, model) as stage:
        monkeypatch.setattr(stage.prefill.prepared, "request", drains_just_then)
        assert [ids(await stage.run(asked())) for _ in range(2)] == [ANSWER[:8]] * 2

    assert [one.request.attempt for one in stage.prefill.calls] == [1, 1]
    assert stage.prefill.calls[1].timeout_ms  # it had been on the open call before


async def test_a_request_too_large_for_an_open_call_ends_as_on_any_other(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        channel = connect(stage.records[0].endpoint, max_message_bytes=1000)
        stub: prefill_pb2_grpc.PrefillNodeAsyncStub = prefill_pb2_grpc.PrefillNodeStub(channel)
        prepared = Prepared(stub)
        prepared.prepare()
        await a_waiting_call(stage)
        taken = prepared.take()
        assert taken is not None
        request = prefill_pb2.PrefillRequest(packed_ids=bytes(2000))
        call = PromptCall(taken, request, deadline=Deadline.after(60), anew=lambda: stub.Prefill(request))

        assert (await status_of(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: stage.prefill.prepared.num_waiting == 0)
        await channel.close()


@pytest.mark.parametrize("num_events", [0, 2])
async def test_a_client_that_leaves_ends_the_call_that_was_open(
    index: EmbeddedServer, model: Path, num_events: int
) -> None:
    async with playing(index, model) as stage:
        await stage.run(asked())
        await a_waiting_call(stage)
        stage.prefill.silent_s = 30.0
        call = stage.inference.Generate(asked())
        for _ in range(num_events):
            await anext(aiter(call))
        await until(lambda: len(stage.prefill.calls) == 2)
        call.cancel()
        await until(lambda: stage.prefill.aborted and stage.decode.aborted)

    assert stage.prefill.num_prepared == 1


async def test_a_node_that_leaves_the_fleet_keeps_no_open_call(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        await stage.run(asked())
        await a_waiting_call(stage)
        await stage.registry.withdraw(convert.incarnation_from_pb(stage.records[0].node))
        await until(lambda: stage.prefill.prepared.num_waiting == 0)
