"""One rank's part of every fetch: its own pages of the blocks, written by the node that has them.

It is a hand-off with the roles exchanged: this rank reserves pages, the ranks of the other node write into them, and
the same session decides when they may be read and when they come back. Rank 0 says with a ring step what is to be
fetched, taken or given up; with the report of a later one it hears what came of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from grpc import aio

from kvrelay.core.errors import ServeError, TransferError
from kvrelay.core.supervise import keep
from kvrelay.core.types import Epoch
from kvrelay.kv_transfer.hub_values import AdmittedHandoff, HubCallbacks
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.kv_transfer.values import Request
from kvrelay.kv_transfer.wire import request_from_pb
from kvrelay.kvcache.allocator import runs_of
from kvrelay.proto.convert import epoch_from_pb, incarnation_from_pb
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import blocks_pb2, blocks_pb2_grpc, handoff_pb2, ring_pb2

TICK_S = 0.2


@dataclass(slots=True)
class _Fetch:
    key: str
    request: Request
    push: asyncio.Task[None] | None = None
    late: asyncio.TimerHandle | None = None
    epoch: Epoch | None = None
    landed: bool = False
    failed: bool = False


@dataclass(slots=True)
class _News:
    """What rank 0 is to hear; appended by the loop, taken by the step thread."""

    landed: deque[str] = field(default_factory=deque)
    failed: deque[tuple[str, str]] = field(default_factory=deque)
    quarantined: deque[str] = field(default_factory=deque)
    free: deque[str] = field(default_factory=deque)


class RankFetcher:
    """`obey` and `report` are the step thread's; all else is the event loop's. Wire it before the first step."""

    def __init__(
        self,
        *,
        rank: int,
        page_tokens: int,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called on the loop when there is something to report."""
        self._rank = rank
        self._page_tokens = page_tokens
        self._loop = loop
        self._limits = limits
        self._wake = wake
        self._fetches: dict[str, _Fetch] = {}
        self._by_epoch: dict[Epoch, _Fetch] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._news = _News()
        self._hub: ReaderHub

    @property
    def callbacks(self) -> HubCallbacks:
        return HubCallbacks(
            on_admitted=self._on_admitted,
            on_failed=lambda epoch, _, reason: self._fail(self._by_epoch[epoch], reason),
            on_pages_free=lambda epoch, _: self._free(self._by_epoch[epoch]),
            wants_token=False,
            on_quarantined=self._on_quarantined,
        )

    def wire(self, hub: ReaderHub) -> None:
        self._hub = hub

    async def keep_time(self) -> None:
        """Make time pass for the sessions, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._hub.tick()

    # ---- on the step thread ----

    def obey(self, step: ring_pb2.RingStep) -> None:
        """Begin and end what a step says; the loop does it."""
        if step.fills or step.fills_taken or step.fills_given_up or step.fences:
            self._loop.call_soon_threadsafe(self._obey, step)

    def report(self, report: ring_pb2.RankReport) -> None:
        """Put into a report what came of fetches since the last one."""
        news = self._news
        # Pages come back last, and what is said meanwhile must not be told behind that.
        for _ in range(len(news.free)):
            report.fills_free.append(news.free.popleft())
        for _ in range(len(news.quarantined)):
            report.fills_quarantined.append(news.quarantined.popleft())
        while news.landed:
            report.fills_landed.append(news.landed.popleft())
        while news.failed:
            key, reason = news.failed.popleft()
            report.fills_failed[key] = reason

    # ---- on the loop ----

    def _obey(self, step: ring_pb2.RingStep) -> None:
        for fill in step.fills:
            self._begin(fill)
        for key in step.fills_taken:
            self._end(key, "")
        for key in step.fills_given_up:
            self._end(key, "the fetch is given up")
        for fence in step.fences:
            alive = incarnation_from_pb(fence.alive) if fence.HasField("alive") else None
            self._hub.fence(fence.writer.name, start_id=fence.writer.start_id, alive=alive, why="fenced by an operator")

    def _begin(self, fill: ring_pb2.RingFill) -> None:
        own = [run for run in fill.pages if run.rank == self._rank]
        if not own:
            return
        pages = [run.first_page + i for run in own for i in range(run.num_pages)]
        timeout_s = fill.timeout_ms / 1000
        fetch = self._fetches[fill.key] = _Fetch(fill.key, request_from_pb(fill.request))
        try:
            ticket = self._hub.reserve(
                fetch.request,
                writer=incarnation_from_pb(fill.source),
                ring_size=fill.source_ranks,
                runs=runs_of(pages),
                resident_tokens=0,
                prompt_tokens=len(pages) * self._page_tokens,
                timeout_s=timeout_s,
                lease_s=timeout_s,
            )
        except ServeError as err:
            self._fail(fetch, str(err))
            self._free(fetch)
            return
        fetch.epoch = epoch_from_pb(ticket.epoch)
        self._by_epoch[fetch.epoch] = fetch
        picked = [handoff_pb2.PageRun(first_page=run.prompt_page, num_pages=run.num_pages) for run in own]
        asked = blocks_pb2.PushRequest(ticket=ticket, block_hashes=fill.block_hashes, pages=picked)
        fetch.push = keep(self._push(fetch, fill.endpoint, asked, timeout_s), name=f"push for {fill.key}")
        self._calls.add(fetch.push)
        fetch.push.add_done_callback(self._calls.discard)
        fetch.late = self._loop.call_later(timeout_s, self._fail, fetch, f"not within {timeout_s:g} s")

    async def _push(self, fetch: _Fetch, endpoint: str, asked: blocks_pb2.PushRequest, timeout_s: float) -> None:
        """Ask for the pages; a refusal is an end, and a success may be heard before the session has sealed."""
        limits = self._limits
        try:
            async with connect(endpoint, max_message_bytes=limits.max_message_bytes, tls=limits.tls) as channel:
                await blocks_pb2_grpc.BlockSourceStub(channel).Push(asked, timeout=timeout_s)
        except aio.AioRpcError as err:
            self._fail(fetch, err.details() or err.code().name)

    def _end(self, key: str, why: str) -> None:
        """Let go of what was fetched; a fetch that is over on this rank is not known any more."""
        fetch = self._fetches.get(key)
        if fetch is None or fetch.epoch is None:
            return
        if fetch.landed:
            self._hub.released(fetch.epoch)  # the call goes on until the source knows that it may let go
            return
        fetch.failed = True
        if fetch.push is not None:
            fetch.push.cancel()
        self._hub.abort(fetch.request, why)

    def _on_admitted(self, handoff: AdmittedHandoff) -> None:
        fetch = self._by_epoch[handoff.epoch]
        if fetch.failed:
            raise TransferError(f"{fetch.key} was given up before it had landed")
        fetch.landed = True
        self._news.landed.append(fetch.key)
        self._wake()

    def _fail(self, fetch: _Fetch, reason: str) -> None:
        if fetch.failed or fetch.landed:
            return
        fetch.failed = True
        self._news.failed.append((fetch.key, reason))
        self._wake()

    def _on_quarantined(self, epoch: Epoch) -> None:
        self._news.quarantined.append(self._by_epoch[epoch].key)
        self._wake()

    def _free(self, fetch: _Fetch) -> None:
        if fetch.late is not None:
            fetch.late.cancel()
        if fetch.epoch is not None:
            del self._by_epoch[fetch.epoch]
        del self._fetches[fetch.key]
        self._news.free.append(fetch.key)
        self._wake()
