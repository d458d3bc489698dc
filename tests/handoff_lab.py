"""A decode side and prefill ranks around the real hand-off: real transports, real gRPC, plain host memory as pools."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from grpc import aio

from kvrelay.core import shard
from kvrelay.core.layout import PageLayout
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, Epoch, Incarnation, PageRun, SampledToken
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.endpoint import (
    AdmittedHandoff,
    HubCallbacks,
    Limits,
    LocalPool,
    Outcome,
    ReaderHub,
    WriterEndpoint,
)
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.hub_servicer import HubServicer
from kvrelay.kv_transfer.transport import Transport, agent_name
from kvrelay.kv_transfer.values import MAX_RING_SIZE, Request
from kvrelay.kvcache.checksum import checksum_ranges
from kvrelay.proto.server import serve
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2
from memory import region_of
from transport_party import new_transport

LAYOUT = PageLayout(
    num_layers=3, latent_width=32, rope_width=16, dtype="float32", model_id="lab", page_tokens=8, block_tokens=8
)
LIMITS = Limits(fence_timeout_s=1.0, drain_s=0.2)
PATIENT_S = 100.0  # times of a reservation for a process that is still to start
Wrap = Callable[[Transport], Transport]


def as_it_is(transport: Transport) -> Transport:
    return transport


class Memory:
    """A pool of `num_pages` pages as bytes."""

    def __init__(self, num_pages: int, *, device: bytes = b"") -> None:
        self.num_pages = num_pages
        self.device = device  # as if it were that one's
        self.mapping = mmap.mmap(-1, num_pages * LAYOUT.page_bytes_all_layers)
        self.view = memoryview(self.mapping)
        self.delays_s: list[float] = []  # of the next checksums

    def pool(self) -> LocalPool:
        return LocalPool(LAYOUT, self.num_pages, self._checksum, device=self.device)

    def _checksum(self, ranges: Sequence[tuple[int, int]]) -> int:
        if self.delays_s:
            time.sleep(self.delays_s.pop())
        return checksum_ranges(self.view, ranges)

    def rows(self, layer: int, page: int, row: int) -> memoryview:
        at = LAYOUT.offset_bytes(layer=layer, page=page, row=row, num_pages=self.num_pages)
        return self.view[at : at + LAYOUT.row_bytes]


@contextmanager
def transfer_thread(
    kind: str, name: str, memory: Memory, fences: FenceMemory, wrap: Wrap = as_it_is
) -> Iterator[TransferThread]:
    def make(counters: Counters) -> Transport:
        pool = region_of(memory.mapping)
        made = new_transport(kind, name=name, pool=pool, pool_pages=memory.num_pages, fences=fences, counters=counters)
        return wrap(made)

    thread = TransferThread(make, on_fatal=lambda: None)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


class _CutServicer(HubServicer):
    """The real service, over a network that can lose what it answers."""

    def __init__(self, side: Reader) -> None:
        super().__init__(side.hub)
        self._side = side

    async def Attach(
        self, request_iterator: AsyncIterator[handoff_pb2.WriterEvent], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[handoff_pb2.ReaderEvent]:
        async for event in super().Attach(request_iterator, context):
            if self._side.loses_answers:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the network was cut")
            yield event


@dataclass
class Reader:
    """The decode side, and what its hub has said so far."""

    memory: Memory
    thread: TransferThread
    fences: FenceMemory
    hub: ReaderHub = field(init=False)
    admitted: list[AdmittedHandoff] = field(default_factory=list)
    failed: list[tuple[Epoch, Request, str]] = field(default_factory=list)
    freed: list[tuple[Epoch, tuple[int, ...]]] = field(default_factory=list)
    num_landed: int = 0  # calls that said that an idle device is to be ready
    loses_answers: bool = False  # what an Attach stream should hear never arrives
    on_free: Callable[[Epoch], None] = lambda epoch: None

    def __post_init__(self) -> None:
        self.hub = ReaderHub(
            node=Incarnation.new("decode"),
            endpoint="",
            pool=self.memory.pool(),
            cells=self.fences.cells,
            thread=self.thread,
            callbacks=HubCallbacks(
                self.admitted.append,
                lambda *failure: self.failed.append(failure),
                self._free,
                on_landed=self._landed,
            ),
            limits=LIMITS,
        )

    def _landed(self) -> None:
        self.num_landed += 1

    def _free(self, epoch: Epoch, pages: tuple[int, ...]) -> None:
        self.freed.append((epoch, pages))
        self.on_free(epoch)

    def reserve(
        self,
        request_id: str,
        *,
        writer: Incarnation,
        attempt: int = 1,
        ring_size: int = 1,
        first_page: int = 0,
        resident_tokens: int = 0,
        prompt_tokens: int = 60,
        timeout_s: float = 20.0,
        lease_s: float = 20.0,
    ) -> handoff_pb2.Ticket:
        return self.hub.reserve(
            Request(request_id, attempt),
            writer=writer,
            ring_size=ring_size,
            runs=(PageRun(first_page, LAYOUT.pages_for(prompt_tokens)),),
            resident_tokens=resident_tokens,
            prompt_tokens=prompt_tokens,
            timeout_s=timeout_s,
            lease_s=lease_s,
        )


async def ticking(hub: ReaderHub) -> None:
    """Let time pass for a hub, as a node's lease thread does, until cancelled."""
    while True:
        await asyncio.sleep(0.1)
        hub.tick()


@asynccontextmanager
async def reader(
    kind: str, *, num_pages: int = 64, wrap: Wrap = as_it_is, device: bytes = b""
) -> AsyncIterator[Reader]:
    memory, fences = Memory(num_pages, device=device), FenceMemory.on_host(16 * MAX_RING_SIZE)
    name = agent_name(Incarnation.new("decode"), 0)
    with transfer_thread(kind, name, memory, fences, wrap) as thread:
        side = Reader(memory, thread, fences)
        server = await serve(
            listen="127.0.0.1:0",
            add_services=lambda s: decode_pb2_grpc.add_DecodeNodeServicer_to_server(
                _CutServicer(side),  # type: ignore[abstract]
                s,
            ),
            services=[decode_pb2.DESCRIPTOR.services_by_name["DecodeNode"]],
            max_message_bytes=32 << 20,
        )
        side.hub.endpoint = server.endpoint
        timer = asyncio.create_task(ticking(side.hub))
        try:
            yield side
        finally:
            timer.cancel()
            await server.stop(0)


@dataclass
class Rank:
    """One prefill rank; its pool holds page k of every prompt at page k."""

    writer: Incarnation
    rank: int
    memory: Memory
    thread: TransferThread
    counters: Counters = field(default_factory=Counters)

    def fill(self, seed: int) -> None:
        self.memory.view[:] = np.random.default_rng(seed).bytes(len(self.memory.view))

    def endpoint(self, ticket: handoff_pb2.Ticket, *, writer: Incarnation | None = None) -> WriterEndpoint:
        return WriterEndpoint(
            ticket=ticket,
            writer=writer or self.writer,
            rank=self.rank,
            pool=self.memory.pool(),
            thread=self.thread,
            counters=self.counters,
            limits=LIMITS,
        )


@contextmanager
def ring(kind: str, *, ring_size: int = 1, num_pages: int = 64, wrap: Wrap = as_it_is) -> Iterator[list[Rank]]:
    """Ranks of one writer incarnation; every rank holds the same bytes."""
    writer = Incarnation.new("prefill")
    with _ranks(kind, writer, list(range(ring_size)), num_pages, wrap) as ranks:
        for rank in ranks:
            rank.fill(seed=1)
        yield ranks


@contextmanager
def _ranks(kind: str, writer: Incarnation, numbers: list[int], num_pages: int, wrap: Wrap) -> Iterator[list[Rank]]:
    if not numbers:
        yield []
        return
    memory = Memory(num_pages)
    with (
        transfer_thread(kind, agent_name(writer, numbers[0]), memory, FenceMemory.on_host(256), wrap) as thread,
        _ranks(kind, writer, numbers[1:], num_pages, wrap) as others,
    ):
        yield [Rank(writer, numbers[0], memory, thread), *others]


def begin(decode: Reader, rank: Rank, **terms: Any) -> tuple[WriterEndpoint, asyncio.Task[Outcome]]:
    """Reserve for the only rank of a ring and let it attach; `terms` are those of `Reader.reserve`."""
    endpoint = rank.endpoint(decode.reserve("r", writer=rank.writer, **terms))
    return endpoint, asyncio.create_task(endpoint.run())


def hand_over(decode: Reader, rank: Rank, **terms: Any) -> tuple[WriterEndpoint, asyncio.Task[Outcome]]:
    """Begin, and send everything."""
    endpoint, running = begin(decode, rank, **terms)
    send_all(endpoint)
    return endpoint, running


def relayed_bytes(tokens: int) -> int:
    return tokens * LAYOUT.row_bytes * LAYOUT.num_layers


def send_all(endpoint: WriterEndpoint, *, ring_size: int = 1, rank: int = 0, chunk_tokens: int = 20) -> None:
    """Add this rank's zigzag share of the relayed tokens, layer by layer, and seal."""
    wanted = endpoint.relayed_tokens
    pages = range(LAYOUT.pages_for(wanted.end))
    for start in range(wanted.start, wanted.end, chunk_tokens):
        chunk = Span(start, min(start + chunk_tokens, wanted.end))
        for layer in range(LAYOUT.num_layers):
            for span in shard.owned(chunk, rank=rank, ring_size=ring_size):
                if span.num_tokens:
                    endpoint.add_part(layer, span, pages)
    seal(endpoint, rank=rank)


def seal(endpoint: WriterEndpoint, *, rank: int = 0) -> None:
    endpoint.seal(first_token=SampledToken(42) if rank == 0 else None, cached_tokens=7 if rank == 0 else 0)


def same_rows(reader: Reader, rank: Rank, tokens: Span, *, first_page: int = 0) -> bool:
    """Are the rows of `tokens` on decode those of the rank, in every layer?"""
    return all(
        reader.memory.rows(layer, first_page + t // LAYOUT.page_tokens, t % LAYOUT.page_tokens)
        == rank.memory.rows(layer, t // LAYOUT.page_tokens, t % LAYOUT.page_tokens)
        for layer in range(LAYOUT.num_layers)
        for t in range(tokens.start, tokens.end)
    )


async def until(question: Callable[[], Any], *, within_s: float = 10.0) -> Any:
    """Return the first true answer."""
    async with asyncio.timeout(within_s):
        while not (answer := question()):  # noqa: ASYNC110 (what is asked about has no event)
            await asyncio.sleep(0.005)
    return answer


async def outcomes(*running: asyncio.Task[Outcome]) -> list[Outcome]:
    async with asyncio.timeout(20):
        return list(await asyncio.gather(*running))
