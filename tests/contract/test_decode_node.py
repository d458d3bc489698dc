"""A decode node that takes real latents over NIXL and answers with the tokens of the oracle."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import torch
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_lab import BLOCK_TOKENS, CPU, Lab, read, running, until
from kvrelay.core import prefix_hash
from kvrelay.core.errors import UnavailableError
from kvrelay.core.types import FinishReason, Incarnation, Sampling
from kvrelay.index.reader import PrefixReader
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.server import EmbeddedServer
from kvrelay.kv_transfer.endpoint import Failed, Settled
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2, decode_pb2, fleet_pb2, handoff_pb2
from oracle_data import LENGTHS, MAX_MODEL_LEN, oracle_folder, recording

ORACLE = "v2_lite_greedy"
DecodeCall = aio.UnaryStreamCall[Any, decode_pb2.DecodeEvent]
GREEDY = Sampling(max_tokens=24)
LONG = Sampling(max_tokens=400)


@pytest.fixture(scope="module")
def index_url() -> Iterator[str]:
    server = EmbeddedServer.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(oracle_folder(ORACLE), dtype="float32", device=CPU, max_model_len=MAX_MODEL_LEN)


@pytest.fixture
async def lab(model: Model, index_url: str) -> AsyncIterator[Lab]:
    async with running(model, index_url) as made:
        yield made


async def refused(call: Any) -> aio.AioRpcError:
    """Return the error that a call ends with."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value


def says_retry(err: aio.AioRpcError) -> bool:
    return ("retry-elsewhere", "1") in tuple(err.trailing_metadata() or ())


async def running_stream(lab: Lab, prompt: list[int]) -> tuple[handoff_pb2.Ticket, DecodeCall]:
    """Begin a long request and return when its first tokens have come."""
    ticket = await lab.reserve(prompt, LONG)
    call = lab.decode(ticket)
    session, first = lab.prefill.prefill(prompt, LONG)
    await lab.prefill.hand_over(ticket, session, first)
    while True:
        event = await call.read()
        assert isinstance(event, decode_pb2.DecodeEvent)
        if event.HasField("tokens"):
            return ticket, call


# ---- the answer


@pytest.mark.parametrize("length", LENGTHS)
async def test_the_streamed_tokens_are_the_recorded_ones(lab: Lab, length: int) -> None:
    wanted = recording(ORACLE, length)
    seen = await lab.generate(wanted.prompt, GREEDY)
    assert seen.token_ids == wanted.greedy
    assert seen.reason is FinishReason.LENGTH
    assert seen.done is not None
    assert seen.done.num_tokens == 23
    assert seen.done.step_ms > 0
    (admitted,) = seen.admitted
    assert admitted.relayed_bytes == length * lab.prefill.pool.layout.row_bytes * lab.prefill.pool.layout.num_layers
    assert min(admitted.exposed_relay_ms, admitted.verify_ms, admitted.admit_ms) >= 0
    stats = await lab.settled()
    assert stats.counters["tokens"] == 23
    assert stats.counters["steps"] == stats.counters["steps_batch_1"] == 23


async def test_a_ring_of_writers_gives_the_same_tokens(model: Model, index_url: str) -> None:
    async with running(model, index_url, ring_size=3) as lab:
        wanted = recording(ORACLE, 1500)
        assert (await lab.generate(wanted.prompt, GREEDY)).token_ids == wanted.greedy
        await lab.settled()


async def test_eight_requests_at_once_get_the_tokens_they_get_alone(lab: Lab) -> None:
    wanted = [recording(ORACLE, length) for length in (1, 7, 64, 333, 1500, 7, 333, 64)]
    ready = [lab.prefill.prefill(one.prompt, GREEDY) for one in wanted]
    tickets = [await lab.reserve(one.prompt, GREEDY) for one in wanted]
    streams = [asyncio.create_task(read(lab.decode(ticket))) for ticket in tickets]
    await asyncio.gather(*(lab.prefill.hand_over(ticket, *one) for ticket, one in zip(tickets, ready, strict=True)))
    for one, (_, first), seen in zip(wanted, ready, await asyncio.gather(*streams), strict=True):
        assert [first.token_id, *seen.token_ids] == one.greedy
    assert any(name.startswith("steps_batch_8") for name in (await lab.settled()).counters)


async def test_a_stop_id_ends_the_request(lab: Lab) -> None:
    wanted = recording(ORACLE, 64)
    stop = wanted.greedy[5]
    seen = await lab.generate(wanted.prompt, Sampling(max_tokens=24, stop_token_ids=(stop,)))
    assert seen.token_ids == wanted.greedy[: wanted.greedy.index(stop) + 1]
    assert seen.reason is FinishReason.STOP
    await lab.settled()


async def test_a_request_that_its_first_token_ends_generates_nothing_here(lab: Lab) -> None:
    wanted = recording(ORACLE, 64)
    seen = await lab.generate(wanted.prompt, Sampling(max_tokens=24, stop_token_ids=(wanted.greedy[0],)))
    assert (seen.token_ids, seen.reason) == (wanted.greedy[:1], FinishReason.STOP)
    seen = await lab.generate(wanted.prompt, Sampling(max_tokens=1))
    assert (seen.token_ids, seen.reason) == (wanted.greedy[:1], FinishReason.LENGTH)
    await lab.settled()


async def test_sampling_and_logprobs_follow_the_request(lab: Lab) -> None:
    prompt = recording(ORACLE, 64).prompt
    sampling = Sampling(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, repetition_penalty=1.2, logprobs=3)
    wanted = list(lab.prefill.engine.generate(prompt, sampling))
    ticket = await lab.reserve(prompt, sampling)
    call = lab.decode(ticket)
    await lab.prefill.hand_over(ticket, *lab.prefill.prefill(prompt, sampling))
    tokens = [token async for event in call for token in event.tokens.tokens]
    assert [token.token_id for token in tokens] == [one.token_id for one in wanted[1:]]
    assert wanted[1].logprob is not None
    assert tokens[0].logprob.logprob == pytest.approx(wanted[1].logprob.logprob, abs=1e-3)
    assert len(tokens[0].logprob.top) == 3


# ---- what is resident


async def test_whole_blocks_of_an_earlier_prompt_are_not_relayed_again(lab: Lab) -> None:
    wanted = recording(ORACLE, 333)
    await lab.generate(wanted.prompt, GREEDY)
    ticket = await lab.reserve(wanted.prompt, GREEDY)
    assert ticket.resident_tokens == 320
    stream = asyncio.create_task(read(lab.decode(ticket)))
    await lab.prefill.hand_over(ticket, *lab.prefill.prefill(wanted.prompt, GREEDY))
    seen = await stream
    assert seen.token_ids == wanted.greedy[1:]
    layout = lab.prefill.pool.layout
    assert seen.admitted[0].resident_tokens == 320
    assert seen.admitted[0].relayed_bytes == 13 * layout.row_bytes * layout.num_layers
    await lab.settled()


async def test_a_prompt_that_is_resident_as_a_whole_is_admitted_without_a_byte(lab: Lab) -> None:
    wanted = recording(ORACLE, 64)
    await lab.generate(wanted.prompt, GREEDY)
    seen = await lab.generate(wanted.prompt, GREEDY)
    assert seen.token_ids == wanted.greedy
    assert (seen.admitted[0].resident_tokens, seen.admitted[0].relayed_bytes) == (64, 0)
    await lab.settled()


async def test_blocks_of_the_output_are_resident_for_the_next_turn(lab: Lab) -> None:
    prompt, sampling = recording(ORACLE, 333).prompt, Sampling(max_tokens=100)
    first_turn = await lab.generate(prompt, sampling)
    # 333 + 99 rows are written: the last token was never fed back.
    longer = [*prompt, *first_turn.token_ids, 5, 6, 7]
    ticket = await lab.reserve(longer, GREEDY)
    assert ticket.resident_tokens == 432 // BLOCK_TOKENS * BLOCK_TOKENS
    wanted = [token.token_id for token in lab.prefill.engine.generate(longer, GREEDY)]
    stream = asyncio.create_task(read(lab.decode(ticket)))
    await lab.prefill.hand_over(ticket, *lab.prefill.prefill(longer, GREEDY))
    assert (await stream).token_ids == wanted[1:]


async def test_the_index_knows_the_blocks_that_are_here_and_forgets_evicted_ones(model: Model, index_url: str) -> None:
    async with running(model, index_url, num_pages=12, fleet="small") as lab:
        prompt = recording(ORACLE, 333).prompt
        hashes = prefix_hash.chain(lab.seed, torch.tensor(prompt, dtype=torch.int32).numpy(), block_tokens=BLOCK_TOKENS)
        reader = PrefixReader(index_url, "small")

        async def blocks_here() -> int:
            held = (await reader.longest(hashes)).holdings
            return next((one.num_blocks for one in held if one.node == lab.server.node.incarnation), 0)

        async def becomes(number: int) -> None:
            async with asyncio.timeout(5):
                while await blocks_here() != number:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        await lab.generate(prompt, GREEDY)
        await becomes(5)
        await lab.reserve(list(range(100)) * 6, Sampling(max_tokens=10))  # 10 of 12 pages
        await becomes(2)
        await reader.close()


async def test_dynamic_ntk_beyond_its_window_neither_uses_nor_fills_the_cache(index_url: str) -> None:
    name = "v3_dynamic_ntk"
    model = load_model(oracle_folder(name), dtype="float32", device=CPU, max_model_len=MAX_MODEL_LEN)
    async with running(model, index_url) as lab:
        wanted = recording(name, 333)
        for _ in range(2):
            seen = await lab.generate(wanted.prompt, GREEDY)
            assert seen.token_ids == wanted.greedy
            assert seen.admitted[0].resident_tokens == 0
        assert (await lab.settled()).cached_pages == 0


# ---- refusals


async def test_reserve_refuses_what_cannot_be(lab: Lab) -> None:
    prompt = recording(ORACLE, 64).prompt
    other = Incarnation("decode", 1)
    for changed, code, text, retry in (
        ({"node": convert.incarnation_to_pb(other)}, grpc.StatusCode.UNAVAILABLE, "not decode@", True),
        ({"layout_fingerprint": b"x" * 16}, grpc.StatusCode.FAILED_PRECONDITION, "layout 7878", True),
        ({"packed_ids": b""}, grpc.StatusCode.INVALID_ARGUMENT, "empty", False),
        ({"packed_ids": b"abc"}, grpc.StatusCode.INVALID_ARGUMENT, "multiple of 4", False),
        ({"packed_ids": convert.pack_ids([1, 70_000])}, grpc.StatusCode.INVALID_ARGUMENT, "70000", False),
        ({"ring_size": 1000}, grpc.StatusCode.INVALID_ARGUMENT, "1000", False),
        ({"packed_ids": convert.pack_ids([1] * 2048)}, grpc.StatusCode.INVALID_ARGUMENT, "limit of 2048", False),
    ):
        err = await refused(lab.stub.Reserve(lab.request(prompt, GREEDY, **changed)))
        assert (err.code(), says_retry(err)) == (code, retry), changed
        assert text in str(err.details())
    assert (await lab.settled()).pinned_pages == 0


async def test_too_large_for_the_node_is_invalid_and_no_room_now_is_exhausted(model: Model, index_url: str) -> None:
    async with running(model, index_url, num_pages=10) as lab:
        err = await refused(lab.stub.Reserve(lab.request([1] * 640, GREEDY)))
        assert err.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "11 pages" in str(err.details())
        await lab.reserve([1] * 320, GREEDY)
        err = await refused(lab.stub.Reserve(lab.request([1] * 320, GREEDY)))
        assert (err.code(), says_retry(err)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert "6 pages wanted, 4 of 10 free, 0 evictable" in str(err.details())


async def test_more_requests_than_the_limit_are_refused(model: Model, index_url: str) -> None:
    async with running(model, index_url, max_requests=2) as lab:
        for _ in range(2):
            await lab.reserve([1, 2], GREEDY)
        err = await refused(lab.stub.Reserve(lab.request([1, 2], GREEDY)))
        assert err.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_attempt_is_reserved_once(lab: Lab) -> None:
    request = lab.request([1, 2, 3], GREEDY)
    await lab.stub.Reserve(request)
    assert (await refused(lab.stub.Reserve(request))).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_abort_that_overtakes_its_reserve_wins(lab: Lab) -> None:
    request = lab.request([1, 2, 3], GREEDY)
    await lab.stub.Abort(common_pb2.AbortRequest(request=request.request))
    assert (await refused(lab.stub.Reserve(request))).code() is grpc.StatusCode.FAILED_PRECONDITION
    await lab.settled()


# ---- ends before the end


async def test_an_abort_at_each_stage_gives_everything_back_and_tells_both_sides(lab: Lab) -> None:
    prompt = recording(ORACLE, 333).prompt
    session, first = lab.prefill.prefill(prompt, GREEDY)
    for stage in ("reserved", "attached", "half written", "manifest missing"):
        ticket = await lab.reserve(prompt, GREEDY)
        stream = asyncio.create_task(read(lab.decode(ticket)))
        writing = None
        if stage != "reserved":
            end = lab.prefill.endpoint(ticket)
            writing = asyncio.create_task(end.run())
            layers = {"attached": 0, "half written": 2, "manifest missing": 4}[stage]
            for layer in range(layers):
                end.add_part(layer, end.relayed_tokens, session.pages.tolist())
            await until(lambda: "reserved" not in lab.server.stats().sessions)
        reply = await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request, reason="a test"))
        assert reply.was_active, stage
        again = await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request, reason="a test"))
        assert not again.was_active, stage
        assert (await refused(stream)).code() is grpc.StatusCode.CANCELLED, stage
        if writing is not None:
            outcome = await asyncio.wait_for(writing, 5)
            assert isinstance(outcome, Failed), stage
            assert "a test" in outcome.reason
        assert (await lab.settled()).cached_pages == 0, stage
    assert first.token_id == recording(ORACLE, 333).greedy[0]


async def test_aborting_a_running_request_ends_its_stream_and_frees_its_pages(lab: Lab) -> None:
    ticket, call = await running_stream(lab, recording(ORACLE, 333).prompt)
    assert (await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request))).was_active
    assert (await refused(read(call))).code() is grpc.StatusCode.CANCELLED
    assert (await lab.settled()).cached_pages == 5


async def test_cancelling_the_stream_aborts_the_request_waiting_or_running(lab: Lab) -> None:
    ticket = await lab.reserve(recording(ORACLE, 333).prompt, GREEDY)
    waiting = lab.decode(ticket)
    await until(lambda: any(record.has_stream for record in lab.server.node.records))
    waiting.cancel()
    await lab.settled()

    _, call = await running_stream(lab, recording(ORACLE, 64).prompt)
    call.cancel()
    await lab.settled()


async def test_nothing_is_held_after_requests_that_ended_at_random_points(model: Model, index_url: str) -> None:
    chance = random.Random(11)
    async with running(model, index_url, num_pages=60) as lab:
        prompts = {length: recording(ORACLE, length) for length in (7, 64, 333)}
        ready = {length: lab.prefill.prefill(one.prompt, GREEDY) for length, one in prompts.items()}

        async def one_request(length: int, *, cancel_after_s: float | None) -> None:
            reserving = lab.stub.Reserve(lab.request(prompts[length].prompt, GREEDY))
            if await reserving.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return
            ticket = (await reserving).ticket
            stream = asyncio.create_task(read(lab.decode(ticket)))
            writing = asyncio.create_task(lab.prefill.hand_over(ticket, *ready[length]))
            if cancel_after_s is None:
                assert (await stream).token_ids == prompts[length].greedy[1:]
            else:
                await asyncio.sleep(cancel_after_s)
                stream.cancel()
            await writing

        async def client() -> None:
            for _ in range(8):
                length = chance.choice((7, 64, 333))
                await one_request(length, cancel_after_s=chance.choice((None, None, 0.0, 0.01, 0.04)))

        await asyncio.gather(*(client() for _ in range(8)))
        stats = await lab.settled(15)
        assert stats.free_pages + stats.cached_pages == 60
        assert stats.counters["requests_finished"] > 10


async def test_a_request_whose_holder_is_silent_ends_by_lease(model: Model, index_url: str) -> None:
    async with running(model, index_url, lease_s=0.5) as lab:
        ticket = await lab.reserve([1, 2, 3], GREEDY)
        renewed = await lab.reserve([1, 2, 3], GREEDY)
        renewal = common_pb2.RenewRequest(
            holder=convert.incarnation_to_pb(lab.holder), request_ids=[renewed.request.request_id, "nobody"]
        )
        for _ in range(10):
            reply = await lab.stub.Renew(renewal)
            assert list(reply.unknown_request_ids) == ["nobody"]
            assert reply.lease_ms == 500
            await asyncio.sleep(0.1)
        assert (await lab.stats()).active_requests == 1
        err = await refused(read(lab.decode(ticket)))
        assert err.code() is grpc.StatusCode.FAILED_PRECONDITION
        await lab.settled()


async def test_somebody_else_cannot_renew_a_request(lab: Lab) -> None:
    ticket = await lab.reserve([1, 2, 3], GREEDY)
    stranger = convert.incarnation_to_pb(Incarnation.new("router"))
    reply = await lab.stub.Renew(common_pb2.RenewRequest(holder=stranger, request_ids=[ticket.request.request_id]))
    assert list(reply.unknown_request_ids) == [ticket.request.request_id]


async def test_a_request_is_known_until_its_holder_was_told_how_it_ended(lab: Lab) -> None:
    ticket = await lab.reserve([1, 2, 3], GREEDY)
    renewal = common_pb2.RenewRequest(
        holder=convert.incarnation_to_pb(lab.holder), request_ids=[ticket.request.request_id]
    )
    await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request))
    assert not (await lab.stub.Renew(renewal)).unknown_request_ids
    assert (await refused(read(lab.decode(ticket)))).code() is grpc.StatusCode.CANCELLED
    assert (await lab.stub.Renew(renewal)).unknown_request_ids


async def test_a_request_out_of_time_ends_waiting_or_running(lab: Lab) -> None:
    waiting = await lab.reserve([1, 2, 3], GREEDY, timeout_ms=300)
    assert (await refused(read(lab.decode(waiting)))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    _, call = await running_stream(lab, recording(ORACLE, 64).prompt)
    (record,) = lab.server.node.records
    record.deadline_s = 0.0
    assert (await refused(read(call))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await lab.settled()


async def test_bytes_that_changed_on_the_way_end_the_request_before_its_first_step(lab: Lab) -> None:
    prompt = recording(ORACLE, 333).prompt
    session, first = lab.prefill.prefill(prompt, GREEDY)
    ticket = await lab.reserve(prompt, GREEDY)
    call = lab.decode(ticket)
    end = lab.prefill.endpoint(ticket)
    for layer in range(lab.prefill.pool.layout.num_layers):
        end.add_part(layer, end.relayed_tokens, session.pages.tolist())
    end.seal(first_token=first, cached_tokens=0)
    # The checksums are taken; nothing leaves before the endpoint runs.
    lab.prefill.pool.layer(2)[session.pages[3], 7, 0] += 1.0
    assert isinstance(await end.run(), Failed)
    err = await refused(read(call))
    assert (err.code(), says_retry(err)) == (grpc.StatusCode.UNAVAILABLE, True)
    assert "checksum" in str(err.details())
    stats = await lab.settled()
    assert stats.cached_pages == 0
    assert stats.counters.get("steps", 0) == 0


async def test_logits_that_are_not_numbers_end_that_request_alone(lab: Lab) -> None:
    _, healthy = await running_stream(lab, recording(ORACLE, 333).prompt)
    prompt = recording(ORACLE, 64).prompt
    ticket = await lab.reserve(prompt, GREEDY)
    call = lab.decode(ticket)
    session, first = lab.prefill.prefill(prompt, GREEDY)
    lab.prefill.pool.layer(0)[session.pages[0], 0] = torch.nan
    assert isinstance((await lab.prefill.hand_over(ticket, session, first))[0], Settled)
    assert (await refused(read(call))).code() is grpc.StatusCode.INTERNAL
    assert isinstance(await healthy.read(), decode_pb2.DecodeEvent)
    healthy.cancel()
    await lab.settled()


async def test_a_writer_that_was_replaced_is_known_to_be_dead(model: Model, index_url: str) -> None:
    async with running(model, index_url, fleet="deaths", heartbeat_s=0.2) as lab:
        ticket = await lab.reserve([1, 2, 3] * 50, GREEDY)
        end = lab.prefill.endpoint(ticket)
        writing = asyncio.create_task(end.run())
        await until(lambda: "attached" in lab.server.stats().sessions)
        call = lab.decode(ticket)
        registry = NodeRegistry(index_url, "deaths")
        newer = fleet_pb2.NodeRecord(node=convert.incarnation_to_pb(Incarnation.new("prefill")))
        await registry.register(newer)
        err = await refused(read(call))
        assert (err.code(), says_retry(err)) == (grpc.StatusCode.UNAVAILABLE, True)
        await lab.settled()
        late = await refused(lab.stub.Reserve(lab.request([1], GREEDY)))
        assert late.code() is grpc.StatusCode.UNAVAILABLE
        await registry.close()
        await writing


async def test_pages_whose_writer_vanished_are_quarantined_until_its_end_is_proven(
    model: Model, index_url: str
) -> None:
    async with running(model, index_url, fleet="lost", heartbeat_s=0.2) as lab:
        ticket = await lab.reserve([1] * 200, Sampling(max_tokens=100))
        writing = asyncio.create_task(lab.prefill.endpoint(ticket).run())
        await until(lambda: "attached" in lab.server.stats().sessions)
        writing.cancel()
        assert (await refused(read(lab.decode(ticket)))).code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: lab.server.stats().quarantined_pages)
        stats = await lab.stats()
        assert (stats.quarantined_pages, stats.pinned_pages, stats.free_pages) == (5, 0, 295)
        await asyncio.wait_for(lab.server.drained(), 1)  # it does not wait for the lost

        registry = NodeRegistry(index_url, "lost")
        newer = fleet_pb2.NodeRecord(node=convert.incarnation_to_pb(Incarnation.new("prefill")))
        await registry.register(newer)
        assert (await lab.settled()).free_pages == 300
        await registry.close()


async def test_a_bug_in_a_step_fails_the_running_requests_clearly(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _, call = await running_stream(lab, recording(ORACLE, 64).prompt)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(lab.server.engine, "step", broken)
    err = await refused(read(call))
    assert (err.code(), says_retry(err)) == (grpc.StatusCode.INTERNAL, True)
    assert "a bug" in str(err.details())
    assert lab.server.node.crashed.is_set()


# ---- the node in its fleet


async def test_a_draining_node_refuses_new_requests_and_finishes_the_others(lab: Lab) -> None:
    _, call = await running_stream(lab, recording(ORACLE, 64).prompt)
    reply = await lab.stub.Drain(common_pb2.DrainRequest())
    assert reply.active_requests == 1
    assert lab.server.drain_asked.is_set()
    drained = asyncio.create_task(lab.server.drained())
    await asyncio.sleep(0)
    err = await refused(lab.stub.Reserve(lab.request([1], GREEDY)))
    assert (err.code(), says_retry(err)) == (grpc.StatusCode.UNAVAILABLE, True)
    assert "draining" in str(err.details())
    assert (await lab.stats()).draining
    seen = await read(call)
    assert seen.done is not None
    assert seen.done.num_tokens == 399
    await asyncio.wait_for(drained, 5)


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
        await asyncio.sleep(0.3)
        assert ((await record()).active_requests, (await record()).free_pages) == (1, 298)
        await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request))
        await lab.server.drained()
        await asyncio.sleep(0.05)
        assert (await record()).draining
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
            async with asyncio.timeout(5):
                while await seen() != (status, num_nodes):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        serving = health_pb2.HealthCheckResponse.SERVING
        await becomes(serving, 1)
        step, go_on = lab.server.engine.step, threading.Event()

        def slow(*args: Any) -> Any:
            go_on.wait(20)
            return step(*args)

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
