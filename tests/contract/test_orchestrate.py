"""A request over both legs, against peers that speak the protocol over real gRPC and play a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from grpc import aio

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import (
    CapacityError,
    DeadlineError,
    RequestCancelledError,
    ServeError,
    Status,
    UnavailableError,
)
from kvrelay.core.grpc_status import grpc_status
from kvrelay.core.types import FinishReason, Incarnation, Role, Sampling
from kvrelay.index.reader import Confidence
from kvrelay.proto import convert
from kvrelay.proto.server import connect, serve
from kvrelay.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, handoff_pb2, prefill_pb2, prefill_pb2_grpc
from kvrelay.router.attempt import Background, Shared
from kvrelay.router.leases import LeaseKeeper
from kvrelay.router.legs import Legs
from kvrelay.router.orchestrate import EndEvent, Event, Job, Orchestrator, PlacedEvent, PromptEvent, TokensEvent
from kvrelay.router.peers import Node, Placed
from kvrelay.router.timesplit import RequestTimer

MAX_BYTES = 1 << 20
ANSWER = [11, 12, 13, 14, 15, 16]


def _token(token_id: int) -> common_pb2.SampledToken:
    return common_pb2.SampledToken(token_id=token_id)


@dataclass
class PlayedPrefill(prefill_pb2_grpc.PrefillNodeServicer):
    """Answers with the token that follows what was sent so far; `fail` or `hang` change that."""

    fail: Callable[[], ServeError] | None = None
    hang: bool = False
    calls: list[prefill_pb2.PrefillRequest] = field(default_factory=list)
    aborts: list[common_pb2.AbortRequest] = field(default_factory=list)
    renewed: set[str] = field(default_factory=set)
    cancelled: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)
    knows: bool = True
    scored: tuple[tuple[float, ...], ...] = ()  # log-probabilities of prompt tokens, per chunk
    break_after_scored: bool = False

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.calls.append(request)
        self.called.set()
        try:
            async with grpc_status(context):
                if self.fail is not None:
                    raise self.fail()
            yield prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted(cached_tokens=64, queue_ms=1))
            if self.hang:
                await asyncio.sleep(30)
            position = 1
            for chunk in self.scored if request.sampling.prompt_logprobs else ():
                scored = common_pb2.PromptLogprobs(first_position=position, logprobs=chunk)
                position += len(chunk)
                yield prefill_pb2.PrefillEvent(prompt_logprobs=scored)
            if self.break_after_scored:
                async with grpc_status(context):
                    raise UnavailableError("a rank died")
            first = prefill_pb2.FirstToken(token=_token(ANSWER[request.num_sent_tokens]), prefill_ms=3.0)
            if request.sampling.max_tokens == 1:
                first.finish_reason = common_pb2.FINISH_REASON_LENGTH
            yield prefill_pb2.PrefillEvent(first_token=first)
            yield prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone(relayed_bytes=1))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def Abort(self, request: Any, context: Any) -> common_pb2.AbortReply:
        self.aborts.append(request)
        return common_pb2.AbortReply(was_active=True)

    async def Renew(self, request: Any, context: Any) -> common_pb2.RenewReply:
        self.renewed.update(request.request_ids)
        return common_pb2.RenewReply(unknown_request_ids=[] if self.knows else request.request_ids)

    async def Drain(self, request: Any, context: Any) -> common_pb2.DrainReply:
        return common_pb2.DrainReply()

    async def Stats(self, request: Any, context: Any) -> common_pb2.NodeStats:
        return common_pb2.NodeStats()


@dataclass
class PlayedDecode(decode_pb2_grpc.DecodeNodeServicer):
    """Streams the rest of ANSWER; `die_after` breaks the stream after that many tokens in all."""

    refuse: Callable[[], ServeError] | None = None
    die_after: int | None = None
    dies_before_done: bool = False
    reserved: list[decode_pb2.ReserveRequest] = field(default_factory=list)
    aborts: list[common_pb2.AbortRequest] = field(default_factory=list)

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveReply:
        async with grpc_status(context):
            if self.refuse is not None:
                raise self.refuse()
        self.reserved.append(request)
        epoch = common_pb2.Epoch(decode=request.node, counter=len(self.reserved))
        return decode_pb2.ReserveReply(ticket=handoff_pb2.Ticket(epoch=epoch, request=request.request))

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[handoff_pb2.ReaderEvent]:
        yield handoff_pb2.ReaderEvent()

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeEvent]:
        reserve = self.reserved[-1]
        sent = reserve.num_sent_tokens + 1
        await asyncio.sleep(0.05)
        yield decode_pb2.DecodeEvent(admitted=decode_pb2.DecodeAdmitted(resident_tokens=64, exposed_relay_ms=1))
        for token in ANSWER[sent : reserve.num_sent_tokens + reserve.sampling.max_tokens]:
            if self.die_after is not None and sent >= self.die_after:
                async with grpc_status(context):
                    raise UnavailableError("the step thread died")
            sent += 1
            yield decode_pb2.DecodeEvent(tokens=decode_pb2.DecodeTokens(tokens=[_token(token)]))
        if self.dies_before_done:
            async with grpc_status(context):
                raise UnavailableError("the step thread died")
        reason = common_pb2.FINISH_REASON_LENGTH
        yield decode_pb2.DecodeEvent(done=decode_pb2.DecodeDone(reason=reason, num_tokens=sent))

    async def Abort(self, request: Any, context: Any) -> common_pb2.AbortReply:
        self.aborts.append(request)
        return common_pb2.AbortReply(was_active=True)

    async def Renew(self, request: Any, context: Any) -> common_pb2.RenewReply:
        return common_pb2.RenewReply()

    async def Drain(self, request: Any, context: Any) -> common_pb2.DrainReply:
        return common_pb2.DrainReply()

    async def Stats(self, request: Any, context: Any) -> common_pb2.NodeStats:
        return common_pb2.NodeStats()


@dataclass(frozen=True)
class PlayedNode:
    incarnation: Incarnation
    endpoint: str
    ring_size: int = 1
    layout_fingerprint: bytes = b"layout"


@dataclass
class Stage:
    """Two nodes of each role, a placer that takes the first one allowed, and one orchestrator."""

    prefill: list[PlayedPrefill]
    decode: list[PlayedDecode]
    prefill_nodes: list[PlayedNode] = field(default_factory=list)
    decode_nodes: list[PlayedNode] = field(default_factory=list)
    released: int = 0
    placed: int = 0
    put_aside: list[Incarnation] = field(default_factory=list)

    async def place(
        self, *, token_ids: npt.NDArray[np.int32], max_tokens: int, needs_decode: bool, avoid: frozenset[Incarnation]
    ) -> Placed:
        prefills = [node for node in self.prefill_nodes if node.incarnation not in avoid]
        decodes = [node for node in self.decode_nodes if node.incarnation not in avoid]
        if not prefills or (needs_decode and not decodes):
            raise UnavailableError("no node left")
        self.placed += 1
        return Placed(prefills[0], decodes[0] if needs_decode else None, b"seed", Confidence.EXACT, self._release)

    def _release(self) -> None:
        self.released += 1


@dataclass
class Channels:
    stage: Stage
    channels: dict[str, aio.Channel] = field(default_factory=dict)

    def _channel(self, node: Node) -> aio.Channel:
        return self.channels.setdefault(node.endpoint, connect(node.endpoint, max_message_bytes=MAX_BYTES))

    def prefill(self, node: Node) -> prefill_pb2_grpc.PrefillNodeAsyncStub:
        return prefill_pb2_grpc.PrefillNodeStub(self._channel(node))

    def decode(self, node: Node) -> decode_pb2_grpc.DecodeNodeAsyncStub:
        return decode_pb2_grpc.DecodeNodeStub(self._channel(node))

    def put_aside(self, node: Incarnation, reason: str) -> None:
        self.stage.put_aside.append(node)


@asynccontextmanager
async def _playing(stage: Stage, *, lease_s: float = 60.0) -> AsyncIterator[Orchestrator]:
    servers = []
    for index, servicer in enumerate((*stage.prefill, *stage.decode)):

        def add(server: aio.Server, servicer: Any = servicer) -> None:
            if isinstance(servicer, PlayedPrefill):
                prefill_pb2_grpc.add_PrefillNodeServicer_to_server(servicer, server)
            else:
                decode_pb2_grpc.add_DecodeNodeServicer_to_server(servicer, server)

        server = await serve(listen="127.0.0.1:0", add_services=add, services=[], max_message_bytes=MAX_BYTES)
        servers.append(server)
        nodes = stage.prefill_nodes if isinstance(servicer, PlayedPrefill) else stage.decode_nodes
        nodes.append(PlayedNode(Incarnation(f"node-{index}", index), server.endpoint))
    me = Incarnation.new("router")
    leases = LeaseKeeper(me, lease_s=lease_s, max_message_bytes=MAX_BYTES)
    leases.start()
    background, channels = Background(), Channels(stage)
    try:
        yield Orchestrator(Shared(me, channels, leases, background), stage, max_retries=2)
        await background.wait()
        assert leases.num_held == 0, "a lease outlived its request"
        assert stage.released == stage.placed, "a placement was never taken off the books"
    finally:
        leases.stop()
        for channel in channels.channels.values():
            await channel.close()
        for server in servers:
            await server.stop(0)


async def _run(
    orchestrator: Orchestrator, *, max_tokens: int = 6, timeout_s: float = 20.0, prompt_logprobs: bool = False
) -> tuple[list[Event], RequestTimer]:
    sampling = Sampling(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    job = Job("r", np.arange(100, dtype=np.int32), sampling)
    timer = RequestTimer()
    run = orchestrator.start(job, timer=timer, deadline=Deadline.after(timeout_s))
    return [event async for event in run.events()], timer


def _tokens(events: list[Event]) -> list[int]:
    return [token.token_id for event in events if isinstance(event, TokensEvent) for token in event.tokens]


async def test_the_first_token_comes_from_prefill_and_the_rest_from_decode() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode()])
    async with _playing(stage) as orchestrator:
        events, timer = await _run(orchestrator)

    assert isinstance(events[0], PlacedEvent)
    assert _tokens(events) == ANSWER
    assert events[-1] == EndEvent(FinishReason.LENGTH)
    assert convert.unpack_ids(stage.prefill[0].calls[0].packed_ids).tolist() == list(range(100))
    assert not stage.prefill[0].aborts
    assert not stage.decode[0].aborts
    split = timer.split()
    parts = split.queue_ms + split.tokenize_ms + split.place_ms + split.reserve_ms + split.prefill_ms
    assert parts + split.delivery_ms == pytest.approx(split.ttft_ms)
    hand_off = split.exposed_relay_ms + split.verify_ms + split.admit_ms + split.first_step_ms
    assert hand_off == pytest.approx(split.second_token_ms - split.ttft_ms)


async def test_n7_one_token_reserves_nothing() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode()])
    async with _playing(stage) as orchestrator:
        events, _ = await _run(orchestrator, max_tokens=1)

    assert _tokens(events) == ANSWER[:1]
    assert not stage.decode[0].reserved
    assert not stage.prefill[0].calls[0].HasField("ticket")


def _scored(events: list[Event]) -> list[tuple[int, tuple[float, ...]]]:
    return [(e.logprobs.first_position, e.logprobs.logprobs) for e in events if isinstance(e, PromptEvent)]


async def test_prompt_logprobs_come_before_the_first_token_and_need_no_decode_node() -> None:
    stage = Stage([PlayedPrefill(scored=((-1.0, -2.0), (-3.0,)))], [])
    async with _playing(stage) as orchestrator:
        events, _ = await _run(orchestrator, max_tokens=1, prompt_logprobs=True)

    assert _scored(events) == [(1, (-1.0, -2.0)), (3, (-3.0,))]
    assert [type(event) for event in events] == [PlacedEvent, PromptEvent, PromptEvent, TokensEvent, EndEvent]


async def test_a_retry_tells_no_prompt_position_twice() -> None:
    first = PlayedPrefill(scored=((-1.0, -2.0), (-3.0,)), break_after_scored=True)
    second = PlayedPrefill(scored=((-1.0,), (-2.0, -3.0, -4.0)))
    stage = Stage([first, second], [PlayedDecode()])
    async with _playing(stage) as orchestrator:
        events, _ = await _run(orchestrator, prompt_logprobs=True)

    assert _scored(events) == [(1, (-1.0, -2.0)), (3, (-3.0,)), (4, (-4.0,))]
    assert _tokens(events) == ANSWER


async def test_after_the_first_token_a_retry_asks_for_no_prompt_logprobs() -> None:
    stage = Stage([PlayedPrefill(scored=((-1.0,),))], [PlayedDecode(die_after=3), PlayedDecode()])
    async with _playing(stage) as orchestrator:
        await _run(orchestrator, prompt_logprobs=True)

    assert [call.sampling.prompt_logprobs for call in stage.prefill[0].calls] == [True, False]


async def test_f4_a_refusing_prefill_node_is_tried_once_and_then_avoided() -> None:
    stage = Stage([PlayedPrefill(fail=lambda: UnavailableError("draining")), PlayedPrefill()], [PlayedDecode()])
    async with _playing(stage) as orchestrator:
        events, _ = await _run(orchestrator)

    assert _tokens(events) == ANSWER
    assert [len(node.calls) for node in stage.prefill] == [1, 1]
    assert [event for event in events if isinstance(event, PlacedEvent)] == events[:1]
    first, second = stage.decode[0].reserved
    assert (first.request.attempt, second.request.attempt) == (1, 2)
    assert [abort.request.attempt for abort in stage.decode[0].aborts] == [1]


async def test_f4_with_no_node_left_the_client_hears_unavailable() -> None:
    stage = Stage([PlayedPrefill(fail=lambda: UnavailableError("broken disk"))], [PlayedDecode()])
    async with _playing(stage) as orchestrator:
        with pytest.raises(ServeError, match=r"broken disk.*after 1 attempt") as caught:
            await _run(orchestrator)

    assert caught.value.status is Status.UNAVAILABLE


async def test_an_error_that_no_other_node_would_heal_is_not_retried() -> None:
    stage = Stage([PlayedPrefill(fail=lambda: ServeError("logits are nan")), PlayedPrefill()], [PlayedDecode()])
    async with _playing(stage) as orchestrator:
        with pytest.raises(ServeError, match="logits are nan") as caught:
            await _run(orchestrator)

    assert caught.value.status is Status.INTERNAL
    assert not stage.prefill[1].calls
    assert len(stage.decode[0].aborts) == 1


async def test_a_full_decode_node_is_answered_with_its_own_words() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(refuse=lambda: CapacityError("9 pages wanted, 3 free"))])
    async with _playing(stage) as orchestrator:
        with pytest.raises(ServeError, match="9 pages wanted, 3 free") as caught:
            await _run(orchestrator)

    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    assert not stage.prefill[0].calls


async def test_f5_a_stream_goes_on_elsewhere_after_decode_died() -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(die_after=3), PlayedDecode()])
    async with _playing(stage) as orchestrator:
        events, _ = await _run(orchestrator)

    assert _tokens(events) == ANSWER
    again = stage.prefill[0].calls[1]
    assert again.num_sent_tokens == 3
    assert convert.unpack_ids(again.packed_ids).tolist() == [*range(100), *ANSWER[:3]]
    assert again.sampling.max_tokens == 3
    assert again.sampling.seed == stage.prefill[0].calls[0].sampling.seed


@pytest.mark.parametrize("max_tokens", [2, 6])
async def test_f5_nothing_is_redone_when_decode_dies_behind_the_last_token(max_tokens: int) -> None:
    stage = Stage([PlayedPrefill()], [PlayedDecode(dies_before_done=True), PlayedDecode()])
    async with _playing(stage) as orchestrator:
        events, _ = await _run(orchestrator, max_tokens=max_tokens)

    assert _tokens(events) == ANSWER[:max_tokens]
    assert events[-1] == EndEvent(FinishReason.LENGTH)
    assert len(stage.prefill[0].calls) == 1


async def test_a_node_that_cancels_a_call_is_replaced() -> None:
    stage = Stage(
        [PlayedPrefill(fail=lambda: RequestCancelledError("shutting down")), PlayedPrefill()], [PlayedDecode()]
    )
    async with _playing(stage) as orchestrator:
        events, _ = await _run(orchestrator)

    assert _tokens(events) == ANSWER


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
    async with _playing(stage) as orchestrator:
        with pytest.raises(DeadlineError):
            await _run(orchestrator, timeout_s=0.5)

    assert len(stage.decode[0].aborts) == len(stage.prefill[0].aborts) == 1


async def test_p7_leaving_early_aborts_both_legs() -> None:
    stage = Stage([PlayedPrefill(hang=True)], [PlayedDecode()])
    async with _playing(stage) as orchestrator:
        task = asyncio.create_task(_run(orchestrator))
        await asyncio.wait_for(stage.prefill[0].called.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert len(stage.decode[0].aborts) == len(stage.prefill[0].aborts) == 1
    assert stage.prefill[0].cancelled == 1


async def test_sessions_are_renewed_and_a_lost_one_is_redone() -> None:
    stage = Stage([PlayedPrefill(hang=True, knows=False), PlayedPrefill()], [PlayedDecode()])
    async with _playing(stage, lease_s=0.3) as orchestrator:
        events, _ = await _run(orchestrator)

    assert "r" in stage.prefill[0].renewed
    assert _tokens(events) == ANSWER
    assert len(stage.prefill[1].calls) == 1
