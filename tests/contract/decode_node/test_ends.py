"""A request that ends before its end: both sides hear it, and every page comes back."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random

import grpc
import pytest
import torch

from decode_lab import (
    GREEDY,
    LONG,
    ORACLE,
    Lab,
    read,
    refused,
    running,
    running_stream,
    says_retry,
    until,
)
from kvrelay.core import logs
from kvrelay.core.types import Incarnation, SampledToken, Sampling
from kvrelay.index.registry import NodeRegistry
from kvrelay.kv_transfer.endpoint import Failed, Settled
from kvrelay.model.transformer import Model
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2, decode_pb2, fleet_pb2
from oracle_data import recording


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
            outcome = await asyncio.wait_for(writing, 20)
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


async def test_a_running_request_that_nobody_listens_to_is_forgotten_when_it_is_aborted(
    model: Model, index_url: str
) -> None:
    async with running(model, index_url, lease_s=1.5) as lab:
        prompt = recording(ORACLE, 64).prompt
        session, first = lab.prefill.prefill(prompt, LONG)
        ticket = await lab.reserve(prompt, LONG)
        await lab.prefill.hand_over(ticket, session, first)
        await until(lambda: lab.server.node.records.num_running)

        assert (await lab.stub.Abort(common_pb2.AbortRequest(request=ticket.request))).was_active

        await lab.settled()
        await asyncio.wait_for(lab.server.drained(), 20)


async def test_a_client_may_give_more_time_than_the_default(model: Model, index_url: str) -> None:
    async with running(model, index_url, max_request_s=7.0) as lab:
        assert (await lab.reserve([1, 2, 3], GREEDY, timeout_ms=30_000)).timeout_ms == 30_000
        assert (await lab.reserve([1, 2, 3], GREEDY, timeout_ms=0)).timeout_ms == 7_000


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


async def test_a_first_token_outside_of_the_vocabulary_ends_its_request_and_not_the_node(lab: Lab) -> None:
    prompt = recording(ORACLE, 333).prompt
    session, first = lab.prefill.prefill(prompt, GREEDY)
    for wrong in (lab.prefill.model.config.vocab_size, (1 << 32) - 1):
        ticket = await lab.reserve(prompt, GREEDY)
        call = lab.decode(ticket)
        (outcome,) = await lab.prefill.hand_over(ticket, session, SampledToken(wrong))
        assert isinstance(outcome, Failed)
        assert str(wrong) in outcome.reason
        assert (await refused(read(call))).code() is not grpc.StatusCode.UNKNOWN
    assert (await lab.settled()).cached_pages == 0

    ticket = await lab.reserve(prompt, GREEDY)
    call = lab.decode(ticket)
    await lab.prefill.hand_over(ticket, session, first)
    assert [first.token_id, *(await read(call)).token_ids][:3] == recording(ORACLE, 333).greedy[:3]


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
        assert (stats.quarantined_pages, stats.pinned_pages, stats.free_pages) == (4, 0, 296)  # the prompt's
        await asyncio.wait_for(lab.server.drained(), 20)  # it does not wait for the lost
        assert "4 pages are in quarantine" in lab.server.why_not_elsewhere  # so this process keeps its role
        lab.server.serve_again()
        again = await lab.reserve([1], GREEDY)
        await lab.stub.Abort(common_pb2.AbortRequest(request=again.request))

        registry = NodeRegistry(index_url, "lost")
        newer = fleet_pb2.NodeRecord(node=convert.incarnation_to_pb(Incarnation.new("prefill")))
        await registry.register(newer)
        assert (await lab.settled()).free_pages == 300
        await until(lambda: not lab.server.why_not_elsewhere)
        await registry.close()


async def test_what_is_logged_of_a_hand_off_names_its_request(model: Model, index_url: str) -> None:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(logs.formatter("json"))
    logging.getLogger("kvrelay").addHandler(handler)
    try:
        async with running(model, index_url, fleet="logged") as lab:
            ticket = await lab.reserve([1] * 200, Sampling(max_tokens=100))
            writing = asyncio.create_task(lab.prefill.endpoint(ticket).run())
            await until(lambda: "attached" in lab.server.stats().sessions)
            writing.cancel()
            await refused(read(lab.decode(ticket)))
            await until(lambda: lab.server.stats().quarantined_pages)
    finally:
        logging.getLogger("kvrelay").removeHandler(handler)

    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    (lost,) = [line for line in lines if "quarantined" in line["message"]]  # found out by the timer, in no call
    assert lost["request_id"] == ticket.request.request_id


async def test_a_bug_in_a_step_fails_the_running_requests_clearly(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    _, call = await running_stream(lab, recording(ORACLE, 64).prompt)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(lab.server.engine, "step", broken)
    err = await refused(read(call))
    assert (err.code(), says_retry(err)) == (grpc.StatusCode.INTERNAL, True)
    assert "a bug" in str(err.details())
    assert lab.server.node.crashed.is_set()
