"""A whole router over real gRPC, a real index server, and nodes that speak the protocol and play a script."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay.core.clock import MAX_TIME_LIMIT_S
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.v1 import (
    common_pb2,
    fleet_pb2,
    inference_pb2,
)
from router_stage import (
    ALPHABET,
    ANSWER,
    TEXT,
    PlayedDecode,
    PlayedPrefill,
    _record,
    asked,
    ids,
    model_of_bytes,
    playing,
    said,
    until,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(tmp_path_factory.mktemp("bytes"))


async def test_a_request_is_accepted_streamed_and_accounted_for(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        events = await stage.run(asked(seed=3))

    first, last = events[0].accepted, events[-1].finished
    assert (first.prompt_tokens, first.seed, first.nodes.prefill_node, first.nodes.decode_node) == (
        5, 3, "prefill", "decode",
    )  # fmt: skip
    assert (said(events), ids(events)) == (TEXT[:8], ANSWER[:8])
    assert last.reason == common_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 8)
    assert last.nodes.index_confidence == inference_pb2.INDEX_CONFIDENCE_DEGRADED  # these nodes publish no blocks
    assert not stage.prefill.aborted
    assert not stage.decode.aborted


async def test_the_time_split_adds_up_to_what_the_client_waits(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, prefill=PlayedPrefill(silent_s=0.2), decode=PlayedDecode(step_s=0.1)) as stage:
        await stage.run(asked())  # connections exist
        loop = asyncio.get_running_loop()
        began_s, token_s = loop.time(), []
        async for event in stage.inference.Generate(asked()):
            if event.WhichOneof("event") == "tokens":
                # One event may carry several: decode's may overtake prefill's first.
                token_s += [loop.time() - began_s] * len(event.tokens.token_ids)
            time = event.finished.time

    first = time.queue_ms + time.tokenize_ms + time.place_ms + time.reserve_ms + time.prefill_ms + time.delivery_ms
    second = time.exposed_relay_ms + time.verify_ms + time.admit_ms + time.first_step_ms
    assert first == pytest.approx(time.ttft_ms)
    assert second == pytest.approx(time.second_token_ms - time.ttft_ms)
    assert time.ttft_ms == pytest.approx(token_s[0] * 1000, rel=0.05, abs=30)
    assert time.second_token_ms == pytest.approx(token_s[1] * 1000, rel=0.05, abs=30)


async def test_a_stop_string_ends_the_text_before_it_and_the_work_at_once(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, decode=PlayedDecode(step_s=0.01)) as stage:
        events = await stage.run(asked(max_tokens=20, stop_strings=["two"]))
        await until(lambda: stage.decode.aborted)

    assert said(events) == "One "
    assert events[-1].finished.reason == common_pb2.FINISH_REASON_STOP
    assert ids(events) == ANSWER[:7]  # no token is lost, though the last three show no text
    assert events[-1].finished.usage.completion_tokens == 7


async def test_a_stop_string_in_the_first_token_leaves_nothing_reserved(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, decode=PlayedDecode(step_s=0.05)) as stage:
        events = await stage.run(asked(stop_strings=["O"]))
        await until(lambda: stage.decode.aborted)

    assert (said(events), ids(events)) == ("", ANSWER[:1])
    assert events[-1].finished.nodes.decode_node == ""


async def test_one_token_needs_no_decode_node(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        events = await stage.run(asked(max_tokens=1))

    assert said(events) == TEXT[:1]
    assert stage.decode.reserved == []
    assert not stage.prefill.calls[0].HasField("ticket")


async def test_silence_of_a_long_prefill_is_filled_with_progress(index: EmbeddedServer, model: Path) -> None:
    slow = PlayedPrefill(silent_s=2.5), PlayedDecode(admit_after_s=2.5)
    async with playing(index, model, prefill=slow[0], decode=slow[1]) as stage:
        events = await stage.run(asked())

    progress = [event.progress for event in events if event.WhichOneof("event") == "progress"]
    assert len(progress) >= 2  # what the node said, and again while it was silent
    assert {(one.prefilled_tokens, one.prompt_tokens) for one in progress} == {(2, 5)}
    assert len(stage.prefill.renewed) == len(stage.decode.renewed) == 1  # leases were kept meanwhile


async def test_the_clients_deadline_ends_both_legs(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, prefill=PlayedPrefill(silent_s=30)) as stage:
        code, _ = await stage.fails(asked(), timeout=2.0)
        await until(lambda: stage.prefill.aborted and stage.decode.aborted)
        await until(lambda: stage.router.inference.num_active == 0)

    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_may_wait_longer_than_a_message_can_say(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        events = await stage.run(asked(), timeout=60 * 86_400)
        (reserved,) = stage.decode.reserved

    assert said(events) == TEXT[:8]
    assert reserved.timeout_ms == MAX_TIME_LIMIT_S * 1000


async def test_the_routers_own_limit_ends_a_request_without_deadline(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, prefill=PlayedPrefill(silent_s=30), max_request_s=0.3) as stage:
        code, text = await stage.fails(asked())

    assert code is grpc.StatusCode.DEADLINE_EXCEEDED, text


@pytest.mark.parametrize("num_events", [1, 2, 4])
async def test_a_cancelled_call_ends_both_legs(index: EmbeddedServer, model: Path, num_events: int) -> None:
    slow = PlayedPrefill(silent_s=0.3), PlayedDecode(step_s=0.2)
    async with playing(index, model, prefill=slow[0], decode=slow[1]) as stage:
        call = stage.inference.Generate(asked())
        for _ in range(num_events):
            await call.read()
        call.cancel()
        await until(lambda: stage.prefill.aborted and stage.decode.aborted)
        await until(lambda: stage.router.inference.num_active == 0)


async def test_without_a_usable_pair_a_request_is_told_at_once_what_is_missing(
    index: EmbeddedServer, model: Path
) -> None:
    async with playing(index, model, register=("prefill",)) as stage:
        assert await stage.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        code, text = await stage.fails(asked(), timeout=20)
        assert (code, "no decode node" in text) == (grpc.StatusCode.UNAVAILABLE, True)

        await stage.registry.register(stage.records[1], ttl_s=60)
        await until(lambda: len(stage.router.fleet.nodes()) == 2)
        await asyncio.sleep(0.05)
        assert await stage.health() == health_pb2.HealthCheckResponse.SERVING
        assert said(await stage.run(asked())) == TEXT[:8]


async def test_nodes_of_different_layouts_are_no_pair(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, decode_layout=b"other") as stage:
        assert await stage.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        code, text = await stage.fails(asked(), timeout=20)

    assert (code, "layout" in text) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_a_node_that_is_gone_makes_a_clear_error_in_time(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, register=("decode",)) as stage:
        await stage.registry.register(_record("ghost", fleet_pb2.NODE_ROLE_PREFILL, "127.0.0.1:1"), ttl_s=60)
        await until(lambda: len(stage.router.fleet.nodes()) == 2)
        code, text = await stage.fails(asked(), timeout=20)
        await until(lambda: stage.decode.aborted)

    assert (code, "ghost" in text) == (grpc.StatusCode.UNAVAILABLE, True)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (asked(temperature=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, ["temperature"]),
        (asked(""), grpc.StatusCode.INVALID_ARGUMENT, ["empty"]),
        (inference_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, ["empty"]),
        (inference_pb2.GenerateRequest(model="x", text="a"), grpc.StatusCode.NOT_FOUND, ["'x'"]),
        (asked("a" * 250), grpc.StatusCode.INVALID_ARGUMENT, ["258", "256"]),  # the nodes' limit, not the config's
        (asked("a" * (2 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, [str(1 << 20)]),
    ],
)
async def test_bad_requests_are_refused_by_name(
    index: EmbeddedServer, model: Path, request_: Any, code: grpc.StatusCode, words: list[str]
) -> None:
    async with playing(index, model) as stage:
        found, text = await stage.fails(request_, timeout=20)

    assert found is code, text
    assert [word for word in words if word not in text] == []
    assert stage.decode.reserved == []


async def test_a_chat_is_rendered(index: EmbeddedServer, model: Path) -> None:
    message = inference_pb2.ChatMessage(role="user", content="abc")
    request = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=[message]))
    request.sampling.max_tokens = 2
    async with playing(index, model) as stage:
        await stage.run(request)

    packed = stage.prefill.calls[0].packed_ids
    assert [ALPHABET[one] for one in convert.unpack_ids(packed)] == ["a", "b", "c"]


async def test_i1_requests_go_on_while_the_index_is_away(model: Path) -> None:
    index = EmbeddedServer.start()
    async with playing(index, model) as stage:
        await asyncio.to_thread(index.stop)
        events = await stage.run(asked(), timeout=20)

        assert said(events) == TEXT[:8]
        assert events[-1].finished.nodes.index_confidence == inference_pb2.INDEX_CONFIDENCE_FALLBACK


async def test_model_info_tells_the_limits_of_the_fleet(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        info = await stage.inference.ModelInfo(inference_pb2.ModelInfoRequest())

    assert info == inference_pb2.ModelInfoReply(
        model="m", max_model_len=256, vocab_size=256, max_message_bytes=1 << 20, block_tokens=64, dtype="float32",
        eos_token_ids=[255], has_tokenizer=True, has_chat_template=True,
    )  # fmt: skip


async def test_o1_a_request_beyond_the_bounded_queue_is_refused_at_once_with_a_hint(
    index: EmbeddedServer, model: Path
) -> None:
    async with playing(index, model, prefill=PlayedPrefill(silent_s=0.5), max_waiting=1) as stage:
        first = asyncio.create_task(stage.run(asked()))
        await until(lambda: stage.prefill.calls)
        with pytest.raises(aio.AioRpcError, match="1 requests wait") as caught:
            await stage.run(asked(), timeout=20)
        assert said(await first) == TEXT[:8]

    hints = dict(caught.value.trailing_metadata() or ())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert int(hints["retry-after-ms"]) == 1000
    assert len(stage.decode.reserved) == 1  # no work was done for it


async def test_a_service_class_that_does_not_exist_is_refused(index: EmbeddedServer, model: Path) -> None:
    request = asked()
    request.service_class = 9  # type: ignore[assignment]
    async with playing(index, model) as stage:
        code, text = await stage.fails(request)

    assert (code, "service_class is 9" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_stopping_router_lets_its_requests_end(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model, decode=PlayedDecode(step_s=0.05)) as stage:
        running = asyncio.create_task(stage.run(asked()))
        await until(lambda: stage.decode.reserved)
        stopping = asyncio.create_task(stage.router.drained())

        assert said(await running) == TEXT[:8]
        await stopping


async def test_a_stopping_router_says_so_then_serves_for_a_moment_then_refuses_for_another_one(
    index: EmbeddedServer, model: Path
) -> None:
    async with playing(index, model, decode=PlayedDecode(step_s=0.1), lame_duck_s=0.4) as stage:
        running = asyncio.create_task(stage.run(asked()))
        await until(lambda: stage.decode.reserved)
        stopping = asyncio.create_task(stage.router.drained())
        await asyncio.sleep(0.05)

        assert await stage.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert said(await stage.run(asked(max_tokens=1))) == TEXT[:1]
        await asyncio.sleep(0.4)
        assert await stage.fails(asked()) == (
            grpc.StatusCode.UNAVAILABLE,
            "this router is stopping; another one may serve the request",
        )
        assert said(await running) == TEXT[:8]
        await stopping
        assert await stage.health() == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_stopping_router_waits_for_its_requests_in_bounds(index: EmbeddedServer, model: Path) -> None:
    decode = PlayedDecode(step_s=30.0)
    async with playing(index, model, decode=decode, lame_duck_s=0.0, drain_s=0.2) as stage:
        running = asyncio.create_task(stage.run(asked()))
        await until(lambda: stage.decode.reserved)
        async with asyncio.timeout(20):
            await stage.router.drained()
        running.cancel()


async def test_reflection_names_the_services(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        call = reflection_pb2_grpc.ServerReflectionStub(stage.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        call.cancel()

    names = {service.name for service in reply.list_services_response.service}
    assert {"kvrelay.v1.Inference", "kvrelay.v1.Fleet", "grpc.health.v1.Health"} <= names
