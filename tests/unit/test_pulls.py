"""A pull beside its request: nothing that ends the request is lost, however the two come together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import Mock

import grpc
import pytest
from grpc import aio

from kvrelay.core.clock import Deadline
from kvrelay.core.drain import DrainRequests
from kvrelay.core.errors import RequestCancelledError, TransferError
from kvrelay.core.layout import PageLayout
from kvrelay.core.lifecycle import StopSignals
from kvrelay.core.types import Counters, Epoch, Incarnation
from kvrelay.kv_transfer.hub_values import AdmittedHandoff
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.prefill_node.fills import FillOrder, PullFrom
from kvrelay.prefill_node.intake import NodeFacts
from kvrelay.prefill_node.jobs import Event, FillEnded, Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.leases import Leases
from kvrelay.prefill_node.pull_servicer import PullServicer
from kvrelay.prefill_node.puller import Puller
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.rank_fetcher import RankFetcher
from kvrelay.prefill_node.servicer import PrefillServicer
from kvrelay.proto.convert import epoch_to_pb
from kvrelay.proto.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2, decode_pb2, handoff_pb2, ring_pb2
from played_ring import BLOCK, PAGE, Ring, a_job

NODE, ROUTER = Incarnation("prefill", 1), Incarnation("router", 1)
SOURCE = PullFrom(Incarnation("decode", 1), "nowhere:1", 4 * BLOCK)
EPOCH = Epoch(NODE, 1)
ADMITTED = AdmittedHandoff(EPOCH, "a", None, 0, 0.0, 0.0, 0, 0, 0.0)


class AbortedAtItsEnd:
    """Pulls at once, and lets the request be aborted when that is done and nobody has looked yet."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.servicer: PrefillServicer
        self.abort: asyncio.Task[common_pb2.AbortReply]

    async def pull(self, job: Job, source: PullFrom, deadline: Deadline) -> int:
        request = common_pb2.AbortRequest(request=job.request, reason="not wanted")
        self.abort = asyncio.create_task(self.servicer.Abort(request, cast(Any, None)))
        return 4 * BLOCK


async def test_an_abort_that_comes_as_a_pull_ends_is_not_lost() -> None:
    ring, puller = Ring(), AbortedAtItsEnd()
    leader = Leader(ring.control, Mock(RankWorker), None, token_bytes=1, on_cache=lambda _: None, counters=Counters())
    leases = Leases(lease_s=9.0, on_expired=leader.cancel)
    facts = NodeFacts(
        NODE, cast(PageLayout, None), ring_size=1, vocab_size=9, max_model_len=999, cache_window_tokens=None,
        max_request_s=9.0,
    )  # fmt: skip
    asked = DrainRequests(StopSignals())
    servicer = PrefillServicer(facts, leader, leases, counters=(), on_drain=asked.ask, puller=cast(Puller, puller))
    puller.servicer = servicer

    events = servicer._run(a_job("a", 150), ROUTER, Deadline.after(2.0), SOURCE)
    with pytest.raises(RequestCancelledError, match="given up"):
        await anext(events)

    assert (await puller.abort).was_active
    assert servicer.active_requests == 0
    leader._commands.take(busy=True)
    assert ring.control.active_jobs == 0


@pytest.mark.parametrize("ring_size", [1, 2])
async def test_a_fence_does_not_wait_for_the_chunk_in_work_but_on_further_ranks(ring_size: int) -> None:
    ring, hub = Ring(ring_size=ring_size), OneEpoch()
    busy = Leader(ring.control, Mock(RankWorker), None, token_bytes=1, on_cache=lambda _: None, counters=Counters())
    servicer = PullServicer(cast(ReaderHub, hub), busy, ring_size=ring_size)  # type: ignore[abstract]
    asked = decode_pb2.FenceWriterRequest(writer=common_pb2.Incarnation(name="dead", start_id=1))

    call = asyncio.create_task(servicer.FenceWriter(asked, cast(Any, None)))
    await asyncio.sleep(0.01)

    assert hub.ends == ["dead fenced"]
    assert call.done() is (ring_size == 1)
    busy._commands.take(busy=True)
    assert (await call).pages == (7 if ring_size == 1 else 0)
    assert [one.writer.name for one in ring.control.plan(0.0).fences] == ["dead"] * (ring_size - 1)


class LyingSource(blocks_pb2_grpc.BlockSourceServicer):
    """Says that all is written, of which nothing is heard."""

    async def Push(self, request: blocks_pb2.PushRequest, context: Any) -> blocks_pb2.PushReply:
        return blocks_pb2.PushReply()


class OneEpoch:
    """What a pull needs of a hub."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def reserve(self, *_: object, **__: object) -> handoff_pb2.Ticket:
        return handoff_pb2.Ticket(epoch=epoch_to_pb(EPOCH))

    def released(self, epoch: Epoch) -> None:
        self.ends.append("released")

    def abort(self, *_: object) -> None:
        self.ends.append("aborted")

    def fence(self, name: str, **_: object) -> int:
        self.ends.append(f"{name} fenced")
        return 7


class Fetching:
    """A rank of a ring of one with its fetcher, whose hub does nothing by itself."""

    def __init__(self, endpoint: str) -> None:
        self.ring, self.hub = Ring(), OneEpoch()
        self.fetcher = RankFetcher(
            rank=0, page_tokens=PAGE, loop=asyncio.get_running_loop(), limits=Limits(), wake=lambda: None
        )
        self.fetcher.wire(cast(ReaderHub, self.hub))
        self.callbacks = self.fetcher.callbacks
        job = a_job("a", 150)
        source = PullFrom(SOURCE.node, endpoint, SOURCE.tokens)
        assert self.ring.control.begin_fill(FillOrder("fill", job.request, source, job.block_hashes[:4], 9.0))

    async def step(self) -> list[Event]:
        """Let rank 0 say something, and hear what came of it."""
        self.fetcher.obey(self.ring.control.plan(0.0))
        await asyncio.sleep(0)
        report = ring_pb2.RankReport()
        self.fetcher.report(report)
        return self.ring.control.applied([report])

    async def called(self) -> None:
        """Wait until the source has answered."""
        async with asyncio.timeout(5):
            while self.fetcher._calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fetching(source: blocks_pb2_grpc.BlockSourceServicer) -> AsyncIterator[Fetching]:
    server = aio.server()
    blocks_pb2_grpc.add_BlockSourceServicer_to_server(source, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield Fetching(endpoint)
    await server.stop(None)


async def test_a_fetch_that_is_given_up_before_it_has_landed_is_aborted_and_not_admitted_any_more() -> None:
    async with fetching(LyingSource()) as one:
        await one.step()
        await one.called()  # it says that all is written; the session decides
        one.ring.control.give_up_fill("fill", "not wanted")

        assert await one.step() == [FillEnded("fill", reason="not wanted")]
        assert one.hub.ends == ["aborted"]
        with pytest.raises(TransferError, match="given up"):
            one.callbacks.on_admitted(ADMITTED)
        one.callbacks.on_pages_free(EPOCH, ())
        await one.step()

        assert (one.ring.pages.account().pinned, len(one.ring.control.fills)) == (0, 0)


async def test_a_fetch_that_has_landed_is_released_once_it_is_cached_and_told_free_last() -> None:
    async with fetching(LyingSource()) as one:
        await one.step()
        one.callbacks.on_admitted(ADMITTED)

        assert (await one.step())[-1] == FillEnded("fill", num_tokens=4 * BLOCK)
        assert one.hub.ends == []
        await one.step()
        assert one.hub.ends == ["released"]
        one.callbacks.on_pages_free(EPOCH, ())
        await one.step()
        assert one.ring.pages.account().pinned == 0


class Forgetful(blocks_pb2_grpc.BlockSourceServicer):
    async def Push(self, request: blocks_pb2.PushRequest, context: Any) -> blocks_pb2.PushReply:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "0 of 4 blocks are here")
        raise AssertionError("unreachable")


async def test_what_the_source_refuses_fails_at_once_and_comes_back_when_it_can_write_no_more() -> None:
    async with fetching(Forgetful()) as one:
        await one.step()
        await one.called()

        assert await one.step() == [FillEnded("fill", reason="0 of 4 blocks are here")]
        await one.step()
        assert one.hub.ends == ["aborted"]
        assert one.ring.pages.account().pinned == 4 * BLOCK // PAGE
        one.callbacks.on_quarantined(EPOCH)
        one.callbacks.on_pages_free(EPOCH, ())
        await one.step()
        account = one.ring.pages.account()
        assert (account.pinned, account.quarantined) == (0, 0)
