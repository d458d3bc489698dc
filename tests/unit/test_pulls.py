"""A pull beside its request: nothing that ends the request is lost, however the two come together."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from grpc import aio

from kvrelay.core.clock import Deadline
from kvrelay.core.drain import DrainRequests
from kvrelay.core.errors import RequestCancelledError
from kvrelay.core.layout import PageLayout
from kvrelay.core.lifecycle import StopSignals
from kvrelay.core.types import Counters, Epoch, Incarnation
from kvrelay.kv_transfer.hub_values import AdmittedHandoff
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.prefill_node.intake import NodeFacts
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.leases import Leases
from kvrelay.prefill_node.puller import Puller, PullFrom
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.servicer import PrefillServicer
from kvrelay.proto.convert import epoch_to_pb
from kvrelay.proto.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2, handoff_pb2
from played_ring import BLOCK, Ring, a_job

NODE, ROUTER = Incarnation("prefill", 1), Incarnation("router", 1)
SOURCE = PullFrom(Incarnation("decode", 1), "nowhere:1", 4 * BLOCK)
EPOCH = Epoch(NODE, 1)


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
    leader = Leader(
        ring.control, cast(RankWorker, None), None, token_bytes=1, on_cache=lambda _: None, counters=Counters()
    )
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
    leader._take_commands(0)
    assert ring.control.active_jobs == 0


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


async def test_a_pull_that_is_cancelled_before_its_admission_is_given_up_and_may_still_be_admitted() -> None:
    ring, hub = Ring(), OneEpoch()
    server = aio.server()
    blocks_pb2_grpc.add_BlockSourceServicer_to_server(LyingSource(), server)
    source = PullFrom(SOURCE.node, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", SOURCE.tokens)
    await server.start()
    puller = Puller(
        on_step=lambda ask: ask(ring.control), block_tokens=BLOCK, row_bytes=1, timeout_s=9.0, limits=Limits()
    )
    puller.wire(cast(ReaderHub, hub))
    pull = asyncio.create_task(puller.pull(a_job("a", 150), source, Deadline.after(9.0)))
    async with asyncio.timeout(5):
        while not puller._waits or puller._pushes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    pull.cancel()
    await asyncio.wait((pull,))
    assert hub.ends == ["aborted"]
    puller.callbacks.on_admitted(AdmittedHandoff(EPOCH, "a", None, 0, 0.0, 0.0, 0, 0, 0.0))
    puller.callbacks.on_pages_free(EPOCH, ())

    assert pull.cancelled()
    assert ring.pages.account().pinned == 0
    await server.stop(None)
