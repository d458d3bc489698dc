"""A request over both legs, against peers that speak the protocol over real gRPC and play a script."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import (
    CapacityError,
    DeadlineError,
    RequestCancelledError,
    ServeError,
    Status,
    UnavailableError,
)
from kvrelay.core.types import FinishReason, Incarnation, Role, Sampling
from kvrelay.proto import convert
from kvrelay.proto.v1 import prefill_pb2
from kvrelay.router.legs import Legs
from kvrelay.router.orchestrate import EndEvent, Event, PlacedEvent, PromptEvent, TokensEvent
from kvrelay.router.timesplit import RequestTimer
from orchestrate_stage import ANSWER, PlayedDecode, PlayedPrefill, Stage, a_job, playing, run, tokens_of


@pytest.fixture(params=[False, True], ids=["called", "prepared"], autouse=True)
def _ways_to_call_prefill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "is_prepared", request.param)


async def test_the_first_token_comes_from_prefill_and_the_rest_from_decode() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        events, timer = await run(orchestrator)

    assert isinstance(events[0], PlacedEvent)
    assert tokens_of(events) == ANSWER
    assert events[-1] == EndEvent(FinishReason.LENGTH)
    assert convert.unpack_ids(stage.prefill[0].calls[0].packed_ids).tolist() == list(range(100))
    assert stage.begun == 1  # what was to be fetched is there
    assert not stage.prefill[0].aborts
    assert not stage.decode[0].aborts
    split = timer.split()
    parts = split.queue_ms + split.tokenize_ms + split.place_ms + split.reserve_ms + split.prefill_ms
    assert parts + split.delivery_ms == pytest.approx(split.ttft_ms)
    hand_off = split.exposed_relay_ms + split.verify_ms + split.admit_ms + split.first_step_ms
    assert hand_off == pytest.approx(split.second_token_ms - split.ttft_ms)


async def test_prefill_has_the_prompt_while_the_client_is_still_being_told_of_its_place() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode()])
    job = a_job(Sampling(max_tokens=6))
    async with playing(stage) as orchestrator:
        run_of_job = orchestrator.start(job, timer=RequestTimer(), deadline=Deadline.after(20.0))
        events = run_of_job.events()
        assert isinstance(await anext(events), PlacedEvent)
        async with asyncio.timeout(5):
            while not stage.prefill[0].calls:  # noqa: ASYNC110 - nobody asks for the next event meanwhile
                await asyncio.sleep(0.01)
        assert tokens_of([event async for event in events]) == ANSWER


async def test_a_prompt_that_decode_completes_itself_needs_no_prefill() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(computes=True)], is_local=True)
    async with playing(stage) as orchestrator:
        events, timer = await run(orchestrator)

    assert isinstance(events[0], PlacedEvent)
    assert events[0].is_local
    assert tokens_of(events) == ANSWER
    assert events[-1] == EndEvent(FinishReason.LENGTH)
    assert not stage.prefill[0].calls
    assert timer.split().prefill_ms == pytest.approx(4.0)


async def test_a_decode_node_that_lacks_more_than_was_thought_has_it_handed_over() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode()], is_local=True)
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert isinstance(events[0], PlacedEvent)
    assert not events[0].is_local
    assert tokens_of(events) == ANSWER
    assert len(stage.prefill[0].calls) == 1


async def test_a_decode_node_that_dies_while_it_computes_is_replaced() -> None:
    stage = Stage(
        [PlayedPrefill()], [PlayedDecode(computes=True, die_after=3), PlayedDecode(computes=True)], is_local=True
    )
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    assert stage.decode[1].reserved[0].num_sent_tokens == 3


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_node_whose_address_is_by_now_that_of_another_role_is_replaced(role: Role) -> None:
    stage = Stage([PlayedPrefill(), PlayedPrefill()], [PlayedDecode(), PlayedDecode()])
    async with playing(stage) as orchestrator:
        of_role, others = stage.prefill_nodes, stage.decode_nodes
        if role is Role.DECODE:
            of_role, others = others, of_role
        gone = of_role[0] = replace(of_role[0], endpoint=others[1].endpoint)
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    assert stage.put_aside == [gone.incarnation]


async def test_n7_one_token_reserves_nothing() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator, max_tokens=1)

    assert tokens_of(events) == ANSWER[:1]
    assert not stage.decode[0].reserved
    assert not stage.prefill[0].calls[0].HasField("ticket")


def _scored(events: list[Event]) -> list[tuple[int, tuple[float, ...]]]:
    return [(e.logprobs.first_position, e.logprobs.logprobs) for e in events if isinstance(e, PromptEvent)]


async def test_prompt_logprobs_come_before_the_first_token_and_need_no_decode_node() -> None:
    stage = Stage([PlayedPrefill(scored=((-1.0, -2.0), (-3.0,)))], [])
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator, max_tokens=1, prompt_logprobs=True)

    assert _scored(events) == [(1, (-1.0, -2.0)), (3, (-3.0,))]
    assert [type(event) for event in events] == [PlacedEvent, PromptEvent, PromptEvent, TokensEvent, EndEvent]


async def test_a_retry_tells_no_prompt_position_twice() -> None:
    first = PlayedPrefill(scored=((-1.0, -2.0), (-3.0,)), break_after_scored=True)
    second = PlayedPrefill(scored=((-1.0,), (-2.0, -3.0, -4.0)))
    stage = Stage([first, second], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator, prompt_logprobs=True)

    assert _scored(events) == [(1, (-1.0, -2.0)), (3, (-3.0,)), (4, (-4.0,))]
    assert tokens_of(events) == ANSWER


async def test_after_the_first_token_a_retry_asks_for_no_prompt_logprobs() -> None:
    stage = Stage([PlayedPrefill(scored=((-1.0,),))], [PlayedDecode(die_after=3), PlayedDecode()])
    async with playing(stage) as orchestrator:
        await run(orchestrator, prompt_logprobs=True)

    assert [call.sampling.prompt_logprobs for call in stage.prefill[0].calls] == [True, False]


async def test_f4_a_refusing_prefill_node_is_tried_once_and_then_avoided() -> None:
    stage = Stage([PlayedPrefill(fail=lambda: UnavailableError("draining")), PlayedPrefill()], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    assert [len(node.calls) for node in stage.prefill] == [1, 1]
    assert [event for event in events if isinstance(event, PlacedEvent)] == events[:1]
    first, second = stage.decode[0].reserved
    assert (first.request.attempt, second.request.attempt) == (1, 2)
    assert [abort.request.attempt for abort in stage.decode[0].aborts] == [1]


async def test_f4_with_no_node_left_the_client_hears_unavailable() -> None:
    stage = Stage([PlayedPrefill(fail=lambda: UnavailableError("broken disk"))], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        with pytest.raises(ServeError, match=r"broken disk.*after 1 attempt") as caught:
            await run(orchestrator)

    assert caught.value.status is Status.UNAVAILABLE


async def test_an_error_that_no_other_node_would_heal_is_not_retried() -> None:
    stage = Stage([PlayedPrefill(fail=lambda: ServeError("logits are nan")), PlayedPrefill()], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        with pytest.raises(ServeError, match="logits are nan") as caught:
            await run(orchestrator)

    assert caught.value.status is Status.INTERNAL
    assert not stage.prefill[1].calls
    assert len(stage.decode[0].aborts) == 1


async def test_o2_nothing_is_prefilled_for_a_request_that_decode_cannot_hold() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(refuse=lambda: CapacityError("9 pages wanted, 3 free"))])
    async with playing(stage) as orchestrator:
        with pytest.raises(ServeError, match="9 pages wanted, 3 free") as caught:
            await run(orchestrator)

    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    assert not stage.prefill[0].calls


async def test_f5_a_stream_goes_on_elsewhere_after_decode_died() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(die_after=3), PlayedDecode()])
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER
    again = stage.prefill[0].calls[1]
    assert again.num_sent_tokens == 3
    assert convert.unpack_ids(again.packed_ids).tolist() == [*range(100), *ANSWER[:3]]
    assert again.sampling.max_tokens == 3
    assert again.sampling.seed == stage.prefill[0].calls[0].sampling.seed


@pytest.mark.parametrize("max_tokens", [2, 6])
async def test_f5_nothing_is_redone_when_decode_dies_behind_the_last_token(max_tokens: int) -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(dies_before_done=True), PlayedDecode()])
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator, max_tokens=max_tokens)

    assert tokens_of(events) == ANSWER[:max_tokens]
    assert events[-1] == EndEvent(FinishReason.LENGTH)
    assert len(stage.prefill[0].calls) == 1


async def test_a_node_that_cancels_a_call_is_replaced() -> None:
    stage = Stage(
        [PlayedPrefill(fail=lambda: RequestCancelledError("shutting down")), PlayedPrefill()], [PlayedDecode()]
    )
    async with playing(stage) as orchestrator:
        events, _ = await run(orchestrator)

    assert tokens_of(events) == ANSWER


async def test_a_cancellation_that_meets_a_message_is_not_lost() -> None:
    for num_switches in range(6):
        legs = Legs({Role.PREFILL: Incarnation("p", 1)})
        task = asyncio.create_task(legs.next(5.0))
        await asyncio.sleep(0.01)
        legs._queue.put_nowait(prefill_pb2.PrefillEvent())
        for _ in range(num_switches):
            if not task.done():
                await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        await asyncio.wait([task])

        assert was_done or task.cancelled(), num_switches


async def test_n7_a_deadline_shorter_than_the_prefill_ends_both_legs() -> None:
    stage = Stage([PlayedPrefill(hang=True)], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        with pytest.raises(DeadlineError):
            await run(orchestrator, timeout_s=0.5)

    assert len(stage.decode[0].aborts) == len(stage.prefill[0].aborts) == 1


async def test_p7_leaving_early_aborts_both_legs() -> None:
    stage = Stage([PlayedPrefill(hang=True)], [PlayedDecode()])
    async with playing(stage) as orchestrator:
        task = asyncio.create_task(run(orchestrator))
        await asyncio.wait_for(stage.prefill[0].called.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(stage.prefill[0].left.wait(), 10)

    assert len(stage.decode[0].aborts) == len(stage.prefill[0].aborts) == 1
    assert stage.prefill[0].cancelled == 1


async def test_sessions_are_renewed_and_a_lost_one_is_redone() -> None:
    stage = Stage([PlayedPrefill(hang=True, knows=False), PlayedPrefill()], [PlayedDecode()])
    async with playing(stage, lease_s=0.3) as orchestrator:
        events, _ = await run(orchestrator)

    assert "r" in stage.prefill[0].renewed
    assert tokens_of(events) == ANSWER
    assert len(stage.prefill[1].calls) == 1
