"""A prompt is given to prefill before decode has made room for it: the two may end in any order, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import (
    CapacityError,
    RequestCancelledError,
    ServeError,
    StaleMessageError,
    UnavailableError,
)
from kvrelay.core.grpc_status import RemoteError
from kvrelay.core.types import Sampling
from kvrelay.proto.v1 import decode_pb2, prefill_pb2
from kvrelay.router import attempt
from kvrelay.router.orchestrate import Orchestrator
from kvrelay.router.timesplit import RequestTimer
from orchestrate_stage import ANSWER, PlayedDecode, PlayedPrefill, Stage, a_job, playing, run, tokens_of


@pytest.fixture(params=[False, True], ids=["called", "prepared"], autouse=True)
def _ways_to_call_prefill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "is_prepared", request.param)


@dataclass
class PatientDecode(PlayedDecode):
    """Makes room once something has happened."""

    waits_for: asyncio.Event = field(default_factory=asyncio.Event)

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveReply:
        await self.waits_for.wait()
        return await super().Reserve(request, context)


@dataclass
class TicketedPrefill(PlayedPrefill):
    """Has its first token only when its ticket is there."""

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        async for event in super().Prefill(request, context):
            if event.HasField("first_token") and request.ticket_follows:
                await self.ticketed.wait()
            yield event


@asynccontextmanager
async def taking_late_tickets(stage: Stage) -> AsyncIterator[Orchestrator]:
    async with playing(stage) as orchestrator:
        stage.prefill_nodes[:] = [replace(node, takes_late_tickets=True) for node in stage.prefill_nodes]
        yield orchestrator


async def test_prefill_has_the_prompt_before_decode_has_made_room() -> None:
    prefill = TicketedPrefill()
    stage = Stage([prefill], [PatientDecode(waits_for=prefill.called)])
    async with taking_late_tickets(stage) as orchestrator:
        events, timer = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    (call,) = prefill.calls
    assert (call.ticket_follows, call.HasField("ticket")) == (True, False)
    assert [ticket.request for ticket in prefill.tickets] == [call.request]
    assert not prefill.aborts
    split = timer.split()
    parts = split.queue_ms + split.tokenize_ms + split.place_ms + split.reserve_ms + split.prefill_ms
    assert parts + split.delivery_ms == pytest.approx(split.ttft_ms)


async def test_a_first_token_that_comes_before_there_is_room_waits_for_it() -> None:
    prefill = PlayedPrefill()
    decode = PatientDecode()
    stage = Stage([prefill], [decode])
    async with taking_late_tickets(stage) as orchestrator:
        running = asyncio.create_task(run(orchestrator))
        await prefill.called.wait()
        await asyncio.sleep(0.1)
        decode.waits_for.set()
        events, _ = await running

    assert tokens_of(events) == ANSWER


async def test_a_decode_node_without_room_ends_the_prompt_that_was_begun_and_another_pair_serves() -> None:
    prefill = TicketedPrefill()
    stage = Stage([prefill], [PlayedDecode(refuse=lambda: CapacityError("full")), PlayedDecode()])
    async with taking_late_tickets(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    assert [call.request.attempt for call in prefill.calls][-1] == 2
    assert 1 in [abort.request.attempt for abort in prefill.aborts]
    assert [ticket.request.attempt for ticket in prefill.tickets] == [2]


async def test_o2_a_decode_node_that_had_no_room_is_asked_for_some_before_a_prompt_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "FULL_S", 60.0)
    prefill = PlayedPrefill()
    # It refuses once the prompt has come: a call that is given up before would not be seen there.
    full = PatientDecode(refuse=lambda: CapacityError("full"), waits_for=prefill.called)
    async with taking_late_tickets(Stage([prefill], [full])) as orchestrator:
        with pytest.raises(RemoteError, match="full"):
            await run(orchestrator)
        again = await asyncio.gather(*(run(orchestrator) for _ in range(4)), return_exceptions=True)
        assert {type(error) for error in again} == {RemoteError}
        assert len(prefill.calls) == 1

        full.refuse = None
        for is_early in (False, True):
            assert tokens_of((await run(orchestrator))[0]) == ANSWER
            assert prefill.calls[-1].ticket_follows is is_early
            orchestrator.shared.full_until_s.clear()


async def test_a_client_that_leaves_while_decode_makes_room_ends_both() -> None:
    prefill, decode = PlayedPrefill(hang=True), PatientDecode()
    stage = Stage([prefill], [decode])
    job = a_job(Sampling(max_tokens=6))
    async with taking_late_tickets(stage) as orchestrator:
        events = orchestrator.start(job, timer=RequestTimer(), deadline=Deadline.after(20.0)).events()
        first = asyncio.ensure_future(anext(events))
        await prefill.called.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.wait_for(prefill.left.wait(), 10)

    assert len(prefill.aborts) == len(decode.aborts) == 1
    assert not prefill.tickets


async def test_a_prefill_node_that_dies_while_decode_makes_room_is_replaced() -> None:
    broken = PlayedPrefill(fail=lambda: UnavailableError("a rank died"))
    stage = Stage([broken, PlayedPrefill()], [PatientDecode(waits_for=broken.called)])
    async with taking_late_tickets(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    assert len(stage.decode[0].aborts) == 1


async def test_a_request_that_is_over_at_prefill_may_refuse_its_ticket() -> None:
    prefill = PlayedPrefill(refuse_ticket=lambda: StaleMessageError("over"))
    stage = Stage([prefill], [PlayedDecode()])
    async with taking_late_tickets(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER


@pytest.mark.parametrize("why", [CapacityError("no"), RequestCancelledError("the server stops")])
async def test_a_ticket_that_cannot_be_given_fails_the_attempt(why: ServeError) -> None:
    prefill = PlayedPrefill(hang=True, refuse_ticket=lambda: why)
    stage = Stage([prefill, PlayedPrefill()], [PlayedDecode()])
    async with taking_late_tickets(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    assert len(prefill.aborts) == 1


async def test_a_node_that_takes_no_late_tickets_gets_its_ticket_with_the_prompt() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        await run(orchestrator)

    (call,) = stage.prefill[0].calls
    assert (call.ticket_follows, call.HasField("ticket")) == (False, True)
    assert not stage.prefill[0].tickets


async def test_a_prompt_that_decode_may_complete_itself_is_not_begun_elsewhere() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(computes=True)], is_local=True)
    async with taking_late_tickets(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    assert not stage.prefill[0].calls
