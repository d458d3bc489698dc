"""A whole decode node in this process, and a prefill side that computes real latents and writes them over NIXL."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from grpc import aio

from kvrelay.core import prefix_hash, shard
from kvrelay.core.drain import DrainRequests
from kvrelay.core.lifecycle import StopSignals
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, FinishReason, Incarnation, SampledToken, Sampling
from kvrelay.decode_node.data_plane import start_decode_agent
from kvrelay.decode_node.serving import DecodeServer
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.endpoint import Limits, LocalPool, Outcome, WriterEndpoint
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.transport import Region, Transport, agent_name
from kvrelay.kvcache.checksum import checksum_ranges
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.loaded import Loaded
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.model.single import Session, SingleEngine
from kvrelay.model.transformer import Model
from kvrelay.proto import convert
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import blocks_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc, handoff_pb2

ORACLE = "v2_lite_greedy"
GREEDY = Sampling(max_tokens=24)
LONG = Sampling(max_tokens=400)
BLOCK_TOKENS = 64
CPU = torch.device("cpu")
LIMITS = Limits(fence_timeout_s=2.0, drain_s=0.2)
# Registered memory stays mapped until the process exits, whatever a test has done with its node.
_ALIVE: list[object] = []
DecodeCall = aio.UnaryStreamCall[Any, decode_pb2.DecodeEvent]


@dataclass
class PrefillSide:
    """One prefill node of `ring_size` ranks that share a pool, an engine and an agent each."""

    model: Model
    incarnation: Incarnation
    engine: SingleEngine
    pool: LatentPool
    threads: list[TransferThread]
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def start(cls, model: Model, *, ring_size: int = 1, num_pages: int = 300) -> PrefillSide:
        pool = LatentPool(model.layout(block_tokens=BLOCK_TOKENS), num_pages, CPU)
        incarnation = Incarnation.new("prefill")
        _ALIVE.append(pool)
        threads = [_transfer(pool, agent_name(incarnation, rank)) for rank in range(ring_size)]
        return cls(model, incarnation, SingleEngine(model, pool), pool, threads)

    def stop(self) -> None:
        for thread in self.threads:
            thread.stop()

    def prefill(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Session, SampledToken]:
        """Compute a prompt; return its latents and its first token."""
        session = self.engine.open(len(prompt))
        logits = self.engine.prefill(session, prompt)
        (token,) = sample(logits, [SamplerState(sampling, prompt)], [len(prompt)])
        assert isinstance(token, SampledToken)
        return session, token

    def endpoint(self, ticket: handoff_pb2.Ticket, rank: int = 0) -> WriterEndpoint:
        memory = self.pool.memory()
        return WriterEndpoint(
            ticket=ticket,
            writer=self.incarnation,
            rank=rank,
            pool=LocalPool(self.pool.layout, self.pool.num_pages, lambda ranges: checksum_ranges(memory, ranges)),
            thread=self.threads[rank],
            counters=self.counters,
            limits=LIMITS,
        )

    async def hand_over(self, ticket: handoff_pb2.Ticket, session: Session, first: SampledToken) -> list[Outcome]:
        """Write everything that the ticket wants, with all ranks, and see it through."""
        ends = [self.endpoint(ticket, rank) for rank in range(len(self.threads))]
        running = [asyncio.create_task(end.run()) for end in ends]
        for rank, end in enumerate(ends):
            for tokens in self.share(end.relayed_tokens, rank):
                for layer in range(self.pool.layout.num_layers):
                    end.add_part(layer, tokens, session.pages.tolist())
            end.seal(first_token=first if rank == 0 else None, cached_tokens=0)
        return list(await asyncio.gather(*running))

    def share(self, relayed: Span, rank: int) -> list[Span]:
        """Return the spans of one rank, in chunks of 500 tokens."""
        chunks = [Span(at, min(at + 500, relayed.end)) for at in range(relayed.start, relayed.end, 500)]
        spans = [shard.owned(chunk, rank=rank, ring_size=len(self.threads)) for chunk in chunks]
        return [span for pair in spans for span in pair if span.num_tokens]


@dataclass
class Seen:
    """What a Decode stream said."""

    token_ids: list[int] = field(default_factory=list)
    admitted: list[decode_pb2.DecodeAdmitted] = field(default_factory=list)
    reason: FinishReason | None = None
    done: decode_pb2.DecodeDone | None = None


@dataclass
class Lab:
    """A decode node, a prefill side, and what a router would hold."""

    server: DecodeServer
    stub: decode_pb2_grpc.DecodeNodeAsyncStub
    blocks: blocks_pb2_grpc.BlockSourceAsyncStub
    prefill: PrefillSide
    asked: DrainRequests
    holder: Incarnation = field(default_factory=lambda: Incarnation.new("router"))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def seed(self) -> bytes:
        return prefix_hash.seed(fingerprint=self.prefill.pool.layout.fingerprint)

    def request(self, prompt: Sequence[int], sampling: Sampling, **changed: Any) -> decode_pb2.ReserveRequest:
        """Return a good ReserveRequest, except for the fields given."""
        fields: dict[str, Any] = {
            "request": common_pb2.RequestRef(request_id=f"r{next(self._numbers)}", attempt=1),
            "holder": convert.incarnation_to_pb(self.holder),
            "node": convert.incarnation_to_pb(self.server.node.incarnation),
            "writer": convert.incarnation_to_pb(self.prefill.incarnation),
            "ring_size": len(self.prefill.threads),
            "packed_ids": convert.pack_ids(prompt),
            "sampling": convert.sampling_to_pb(sampling),
            "layout_fingerprint": self.prefill.pool.layout.fingerprint,
            "prefix_seed": self.seed,
            "timeout_ms": 30_000,
        }
        return decode_pb2.ReserveRequest(**{**fields, **changed})

    async def reserve(self, prompt: Sequence[int], sampling: Sampling, **changed: Any) -> handoff_pb2.Ticket:
        reply: decode_pb2.ReserveReply = await self.stub.Reserve(self.request(prompt, sampling, **changed))
        return reply.ticket

    def decode(self, ticket: handoff_pb2.Ticket) -> DecodeCall:
        return self.stub.Decode(decode_pb2.DecodeRequest(request=ticket.request, epoch=ticket.epoch))

    async def generate(self, prompt: Sequence[int], sampling: Sampling, **changed: Any) -> Seen:
        """Play a whole request; `Seen.token_ids` starts with the first token."""
        ticket = await self.reserve(prompt, sampling, **changed)
        stream = asyncio.create_task(read(self.decode(ticket)))
        session, first = self.prefill.prefill(prompt, sampling)
        await self.prefill.hand_over(ticket, session, first)
        seen = await stream
        seen.token_ids.insert(0, first.token_id)
        self.prefill.engine.close(session)
        return seen

    async def stats(self) -> common_pb2.NodeStats:
        return await self.stub.Stats(common_pb2.StatsRequest())

    async def settled(self, within_s: float = 15.0) -> common_pb2.NodeStats:
        """Wait until nothing is held for any request, with an account that adds up at every look; return it."""
        async with asyncio.timeout(within_s):
            while True:
                stats = await self.stats()
                parts = stats.free_pages + stats.cached_pages + stats.pinned_pages + stats.quarantined_pages
                assert stats.total_pages == parts, stats
                if not (stats.pinned_pages or stats.quarantined_pages or stats.active_requests or stats.sessions):
                    self.server.node.book.check()
                    return stats
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(
    model: Model, index_url: str, *, ring_size: int = 1, num_pages: int = 300, **settings: Any
) -> AsyncIterator[Lab]:
    """Run a node and its prefill side for as long as the block lasts."""
    made = DecodeSettings(
        model="as loaded", name="decode", index_url=index_url, fence_timeout_s=2.0, **{"lame_duck_s": 0.0, **settings}
    )
    pool = LatentPool(model.layout(block_tokens=BLOCK_TOKENS), num_pages, CPU)
    _ALIVE.append(pool)
    incarnation = Incarnation.new("decode")
    agent = start_decode_agent(pool, made, incarnation, on_fatal=lambda: None)
    asked = DrainRequests(StopSignals())
    server = DecodeServer(made, Loaded(CPU, model, pool), incarnation, agent, asked)
    await server.start()
    prefill = PrefillSide.start(model, ring_size=ring_size)
    try:
        async with connect(server.endpoint, max_message_bytes=32 << 20) as channel:
            yield Lab(
                server,
                decode_pb2_grpc.DecodeNodeStub(channel),
                blocks_pb2_grpc.BlockSourceStub(channel),
                prefill,
                asked,
            )
    finally:
        await server.stop()
        await asyncio.to_thread(agent.transfer.stop)
        prefill.stop()


async def read(call: DecodeCall) -> Seen:
    """Read a Decode stream to its end."""
    seen = Seen()
    while isinstance(event := await call.read(), decode_pb2.DecodeEvent):
        match event.WhichOneof("event"):
            case "admitted":
                seen.admitted.append(event.admitted)
            case "tokens":
                seen.token_ids += [token.token_id for token in event.tokens.tokens]
            case "done":
                seen.done, seen.reason = event.done, convert.finish_from_pb(event.done.reason)
    return seen


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


async def until(question: Callable[[], Any], *, within_s: float = 10.0) -> Any:
    """Return the first true answer."""
    async with asyncio.timeout(within_s):
        while not (answer := question()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return answer


def _transfer(pool: LatentPool, name: str) -> TransferThread:
    fences = FenceMemory.on_host(256)
    _ALIVE.append(fences)

    def make(counters: Counters) -> Transport:
        return NixlTransport(
            agent_name=name,
            pool=Region(pool.address, pool.num_bytes),
            pool_pages=pool.num_pages,
            fences=fences,
            counters=counters,
        )

    thread = TransferThread(make, on_fatal=lambda: None)
    thread.start()
    return thread
