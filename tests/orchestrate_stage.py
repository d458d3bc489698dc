"""Nodes that speak the protocol over real gRPC and play a script, and one orchestrator in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from grpc import aio

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import (
    ServeError,
    UnavailableError,
)
from kvrelay.core.grpc_status import grpc_status
from kvrelay.core.types import Incarnation, Sampling
from kvrelay.index.reader import Confidence
from kvrelay.proto import convert
from kvrelay.proto.server import connect, serve
from kvrelay.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, handoff_pb2, prefill_pb2, prefill_pb2_grpc
from kvrelay.router.admission import Terms
from kvrelay.router.attempt import Background, Shared
from kvrelay.router.leases import LeaseKeeper
from kvrelay.router.orchestrate import Event, Job, Orchestrator, TokensEvent
from kvrelay.router.peers import Node, Placed
from kvrelay.router.prepared import Prepared
from kvrelay.router.timesplit import RequestTimer
from played_decode import WithoutHandoffs
from played_prepared import WithPreparedCalls

MAX_BYTES = 1 << 20
ANSWER = [11, 12, 13, 14, 15, 16]


def a_token(token_id: int) -> common_pb2.SampledToken:
    return common_pb2.SampledToken(token_id=token_id)


@dataclass
class PlayedPrefill(WithPreparedCalls):
    """Answers with the token that follows what was sent so far; `fail`, `hang` and others change that."""

    fail: Callable[[], ServeError] | None = None
    hang: bool = False
    fetches_for_ever: bool = False  # hangs before it has begun
    calls: list[prefill_pb2.PrefillRequest] = field(default_factory=list)
    aborts: list[common_pb2.AbortRequest] = field(default_factory=list)
    renewed: set[str] = field(default_factory=set)
    cancelled: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # by a caller that was still owed an answer
    knows: bool = True
    scored: tuple[tuple[float, ...], ...] = ()  # log-probabilities of prompt tokens, per chunk
    break_after_scored: bool = False
    tickets: list[handoff_pb2.Ticket] = field(default_factory=list)  # that came late
    ticketed: asyncio.Event = field(default_factory=asyncio.Event)
    refuse_ticket: Callable[[], ServeError] | None = None

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.calls.append(request)
        self.called.set()
        try:
            async with grpc_status(context):
                if self.fail is not None:
                    raise self.fail()
            if self.fetches_for_ever:
                await asyncio.sleep(30)
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
            first = prefill_pb2.FirstToken(token=a_token(ANSWER[request.num_sent_tokens]), prefill_ms=3.0)
            if request.sampling.max_tokens == 1:
                first.finish_reason = common_pb2.FINISH_REASON_LENGTH
            yield prefill_pb2.PrefillEvent(first_token=first)
            yield prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone(relayed_bytes=1))
        except (asyncio.CancelledError, GeneratorExit):  # the latter when it was just saying something
            self.cancelled += 1
            self.left.set()
            raise

    async def GiveTicket(self, request: Any, context: Any) -> prefill_pb2.GiveTicketReply:
        async with grpc_status(context):
            if self.refuse_ticket is not None:
                raise self.refuse_ticket()
        self.tickets.append(request.ticket)
        self.ticketed.set()
        return prefill_pb2.GiveTicketReply()

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
class PlayedDecode(WithoutHandoffs):
    """Streams the rest of ANSWER; `die_after` breaks the stream after that many tokens in all."""

    refuse: Callable[[], ServeError] | None = None
    die_after: int | None = None
    dies_before_done: bool = False
    computes: bool = False  # the rest of the prompt itself, when it may
    reserved: list[decode_pb2.ReserveRequest] = field(default_factory=list)
    aborts: list[common_pb2.AbortRequest] = field(default_factory=list)

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveReply:
        async with grpc_status(context):
            if self.refuse is not None:
                raise self.refuse()
        self.reserved.append(request)
        epoch = common_pb2.Epoch(decode=request.node, counter=len(self.reserved))
        ticket = handoff_pb2.Ticket(epoch=epoch, request=request.request)
        return decode_pb2.ReserveReply(ticket=ticket, computes=self.computes and request.may_compute)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeEvent]:
        reserve = self.reserved[-1]
        sent = reserve.num_sent_tokens + 1
        await asyncio.sleep(0.05)
        yield decode_pb2.DecodeEvent(admitted=decode_pb2.DecodeAdmitted(resident_tokens=64, exposed_relay_ms=1))
        if self.computes and reserve.may_compute:
            first = decode_pb2.DecodeFirst(token=a_token(ANSWER[sent - 1]), prefill_ms=4.0, computed_tokens=36)
            yield decode_pb2.DecodeEvent(first=first)
        for token in ANSWER[sent : reserve.num_sent_tokens + reserve.sampling.max_tokens]:
            if self.die_after is not None and sent >= self.die_after:
                async with grpc_status(context):
                    raise UnavailableError("the step thread died")
            sent += 1
            yield decode_pb2.DecodeEvent(tokens=decode_pb2.DecodeTokens(tokens=[a_token(token)]))
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
    takes_late_tickets: bool = False
    takes_prepared_calls: bool = False


@dataclass
class Stage:
    """Two nodes of each role, a placer that takes the first one allowed, and one orchestrator."""

    prefill: list[PlayedPrefill]
    decode: list[PlayedDecode]
    prefill_nodes: list[PlayedNode] = field(default_factory=list)
    decode_nodes: list[PlayedNode] = field(default_factory=list)
    is_local: bool = False  # what is placed may be completed by decode itself
    released: int = 0
    begun: int = 0
    placed: int = 0
    put_aside: list[Incarnation] = field(default_factory=list)
    is_prepared: ClassVar[bool] = False  # calls to the prefill nodes are open before there are requests

    async def place(
        self,
        *,
        token_ids: npt.NDArray[np.int32],
        max_tokens: int,
        needs_decode: bool,
        avoid: frozenset[Incarnation],
        terms: Terms | None = None,
    ) -> Placed:
        prefills = [node for node in self.prefill_nodes if node.incarnation not in avoid]
        decodes = [node for node in self.decode_nodes if node.incarnation not in avoid]
        if not prefills or (needs_decode and not decodes):
            raise UnavailableError("no node left")
        self.placed += 1
        decode = decodes[0] if needs_decode else None
        return Placed(
            prefills[0], decode, b"seed", Confidence.EXACT, self._release, is_local=self.is_local, begun=self._begin
        )  # fmt: skip

    def _begin(self) -> None:
        self.begun += 1

    def _release(self) -> None:
        self.released += 1


@dataclass
class Channels:
    stage: Stage
    channels: dict[str, aio.Channel] = field(default_factory=dict)
    waiting: dict[str, Prepared] = field(default_factory=dict)

    def _channel(self, node: Node) -> aio.Channel:
        return self.channels.setdefault(node.endpoint, connect(node.endpoint, max_message_bytes=MAX_BYTES))

    def prefill(self, node: Node) -> prefill_pb2_grpc.PrefillNodeAsyncStub:
        return prefill_pb2_grpc.PrefillNodeStub(self._channel(node))

    def decode(self, node: Node) -> decode_pb2_grpc.DecodeNodeAsyncStub:
        return decode_pb2_grpc.DecodeNodeStub(self._channel(node))

    def prepared(self, node: Node) -> Prepared:
        return self.waiting.setdefault(node.endpoint, Prepared(self.prefill(node)))

    def put_aside(self, node: Incarnation, reason: str) -> None:
        self.stage.put_aside.append(node)


@asynccontextmanager
async def playing(stage: Stage, *, lease_s: float = 60.0) -> AsyncIterator[Orchestrator]:
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
        name = Incarnation(f"node-{index}", index)
        nodes.append(PlayedNode(name, server.endpoint, takes_prepared_calls=stage.is_prepared))
    me = Incarnation.new("router")
    leases = LeaseKeeper(me, lease_s=lease_s, max_message_bytes=MAX_BYTES)
    leases.start()
    background, channels = Background(), Channels(stage)
    for node in stage.prefill_nodes if stage.is_prepared else ():
        channels.prepared(node).prepare()
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


async def run(
    orchestrator: Orchestrator, *, max_tokens: int = 6, timeout_s: float = 20.0, prompt_logprobs: bool = False
) -> tuple[list[Event], RequestTimer]:
    job = a_job(Sampling(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs))
    timer = RequestTimer()
    run = orchestrator.start(job, timer=timer, deadline=Deadline.after(timeout_s))
    return [event async for event in run.events()], timer


def a_job(sampling: Sampling) -> Job:
    prompt = np.arange(100, dtype=np.int32)
    return Job("r", prompt, convert.pack_ids(prompt), sampling)


def tokens_of(events: list[Event]) -> list[int]:
    return [token.token_id for event in events if isinstance(event, TokensEvent) for token in event.tokens]
