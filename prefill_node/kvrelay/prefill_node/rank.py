"""One rank: it obeys ring steps, and knows of each request only what the steps told.

Shapes in this file: T own tokens of the chunk, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.core.health import StuckS
from kvrelay.core.types import Counters, PromptLogprobs
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.transformer import Model
from kvrelay.prefill_node.chunk_layers import AskLeave, ChunkLayers
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.chunk_work import ChunkWork
from kvrelay.prefill_node.device_queue import DeviceQueue, TimedChunk
from kvrelay.prefill_node.group import Leave
from kvrelay.prefill_node.host_copier import HostCopier
from kvrelay.prefill_node.jobs import job_key
from kvrelay.prefill_node.late_relay import LateRelay
from kvrelay.prefill_node.prompt_logprobs import score
from kvrelay.prefill_node.rank_relays import LateTicket, RankRelays
from kvrelay.prefill_node.rank_request import Fetcher, RankRequest, Writer
from kvrelay.prefill_node.relay import Relay
from kvrelay.prefill_node.ring import Ring
from kvrelay.prefill_node.ring_plan import PageTable
from kvrelay.proto.convert import prompt_logprobs_to_pb, span_from_pb, unpack_ids
from kvrelay.proto.v1 import handoff_pb2, ring_pb2

TRANSFER_STUCK = "transfer_stuck_s_max"  # a counter of every rank: see TransferThread.stuck_s


@dataclass(frozen=True, slots=True)
class StepResult:
    report: ring_pb2.RankReport
    timed: Sequence[TimedChunk] | None  # chunks that a device has ended; None: this step's chunk has, whatever it took
    logits_V: Tensor | None = None  # after the last token of a prompt; rank 0 only


@dataclass(frozen=True, slots=True)
class _Ran:
    """What came of one chunk on this rank."""

    leave: Leave = Leave.NO
    layers_left: int = 0  # of a chunk that is paused
    logits_V: Tensor | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()


class RankWorker:
    """Runs the chunks of this rank. Used by the step thread only."""

    def __init__(
        self,
        model: Model,
        pool: LatentPool,
        ring: Ring,
        *,
        open_writer: Callable[[handoff_pb2.Ticket], Writer],
        planner: ChunkPlanner,
        counters: Counters,
        more_counters: Sequence[Counters] = (),
        transfer_stuck_s: StuckS = lambda: 0.0,
    ) -> None:
        """
        Args:
            counters: of this thread.
            more_counters: of other threads of this rank, reported along with them.
            transfer_stuck_s: of this rank's transfer thread, reported too.
        """
        self._model = model
        self._pool = pool
        self._rank = ring.rank
        self._planner = planner
        self._counters = counters
        self._fetcher: Fetcher | None = None
        self._more_counters = more_counters
        self._transfer_stuck_s = transfer_stuck_s
        self.copier: HostCopier | None = None  # set before the first step when host memory is behind the cache
        self._requests: dict[str, RankRequest] = {}
        self._queue = DeviceQueue.of(pool.device)
        self._relays = RankRelays(
            open_writer=open_writer, device=pool.device, rank=ring.rank, num_layers=pool.layout.num_layers
        )
        self._layers = ChunkLayers(model, pool, ring, self._relays, queue=self._queue, counters=counters)

    def take_late_tickets(self, late_ticket: LateTicket) -> None:
        """Say where tickets come late; before the first step."""
        self._relays.late_ticket = late_ticket

    def fetch_by(self, fetcher: Fetcher, counters: Counters) -> None:
        """Let blocks be fetched; before the first step. The counters are reported along with the others."""
        self._fetcher = fetcher
        self._more_counters = (*self._more_counters, counters)

    def bind_thread(self) -> None:
        """Let the calling thread compute; once, before its first step."""
        self._pool.bind_thread()

    def close(self) -> None:
        """Wait for the copies that were begun: nothing of this worker touches the pool afterwards."""
        if self.copier is not None:
            self.copier.close()

    @torch.inference_mode()
    def run(self, step: ring_pb2.RingStep, ask: AskLeave) -> StepResult:
        """Do one step. `ask` is asked before each layer, and heeded on rank 0 only."""
        for copy in step.copies:
            assert self.copier is not None, "rank 0 and this rank have the same setting"
            self.copier.obey(copy, rank=self._rank)
        if self._fetcher is not None:
            self._fetcher.obey(step)
        for opened in step.opens:
            self._open(opened)
        for push in step.pushes:
            self._open_push(push)
        ran = _Ran()
        if step.HasField("chunk"):
            ran = self._run_chunk(step.step_id, step.chunk, ask)
        for key in step.closes:
            self._close(key, abort=key in step.aborts)
        self._relays.pump(self._requests.values())
        timed = None if self._queue is None else self._queue.take_timed()
        return StepResult(self._report(step.step_id, ran), timed, ran.logits_V)

    def has_reached(self) -> bool:
        """Say whether the chunk in work is what this rank computes, and nothing that was launched before it."""
        return self._queue is None or self._queue.has_reached()

    def relay_of(self, key: str) -> Relay | LateRelay | None:
        """Return the relay of a request that is open here, so that rank 0 can seal it with the first token."""
        request = self._requests.get(key)
        return None if request is None else request.relay

    def abort(self, key: str, reason: str) -> None:
        """Give up this rank's hand-off of a request at once; the other ranks hear of it with the next step."""
        request = self._requests.get(key)
        if request is not None and request.writer is not None:
            request.writer.abort(reason)

    def take_settled(self) -> list[str]:
        """Return the requests whose hand-off was admitted by the reader since the last call."""
        settled = [
            r for r in self._requests.values() if r.writer is not None and r.writer.settled and not r.settled_told
        ]
        for request in settled:
            request.settled_told = True
        return [request.key for request in settled]

    def _open(self, opened: ring_pb2.RingOpen) -> None:
        table = PageTable(prompt_tokens=opened.prompt_tokens, page_tokens=self._pool.layout.page_tokens)
        _fill(table, opened.cached_pages)
        key = job_key(opened.request)
        request = RankRequest(key, opened.prompt_tokens, opened.cached_tokens, table, opened.prompt_logprobs)
        if opened.HasField("ticket"):
            self._relays.begin(request, opened.ticket)
        elif opened.ticket_follows:
            request.relay = LateRelay()
        self._requests[key] = request

    def _open_push(self, push: ring_pb2.RingPush) -> None:
        ticket = push.ticket
        table = PageTable(prompt_tokens=ticket.prompt_tokens, page_tokens=self._pool.layout.page_tokens)
        _fill(table, push.pages)
        request = RankRequest(push.key, ticket.prompt_tokens, ticket.prompt_tokens, table, is_push=True)
        self._relays.begin_push(request, ticket)
        self._requests[push.key] = request

    def _run_chunk(self, step_id: int, chunk: ring_pb2.RingChunk, ask: AskLeave) -> _Ran:
        """Compute one chunk, or what is left of it; the logits after the prompt's last token come from rank 0."""
        request = self._requests[chunk.request_id]
        work = self._resumed(request, chunk) if chunk.resumes else self._begun(request, chunk)
        if self._queue is not None:
            self._queue.begin()
        leave = self._layers.run(step_id, request, work, self._requests.values(), ask)
        if self._queue is not None:
            tokens = work.tokens if leave is Leave.NO else None
            request.last_chunk, part = self._queue.end(tokens, earlier=work.parts)
            work.parts = (*work.parts, part)
        if leave is Leave.PAUSE:
            request.paused = work
            return _Ran(leave, layers_left=self._layers.num_layers - work.next_layer)
        if leave is Leave.STOP:
            return _Ran(leave)
        self._counters.add("chunks")
        self._counters.add("prefill_tokens_executed", len(work.plan.positions_T))
        scored: list[PromptLogprobs] = []
        if request.wants_logprobs:
            scored = score(
                self._model, work.hidden_TD, work.plan.positions_T, work.ids, first_position=work.tokens.start
            )
        logits_V = None
        if chunk.is_last and self._rank == 0:  # owns the last token; seals once the first token is chosen
            logits_V = self._model.logits(work.hidden_TD[-1:])[0]
        elif chunk.is_last and request.relay is not None:
            request.relay.seal(first_token=None, cached_tokens=0)
        return _Ran(logits_V=logits_V, prompt_logprobs=scored)

    def _begun(self, request: RankRequest, chunk: ring_pb2.RingChunk) -> ChunkWork:
        tokens = span_from_pb(chunk.tokens)
        _fill(request.table, chunk.new_pages)
        ids = unpack_ids(chunk.packed_ids)
        if chunk.HasField("next_id"):
            ids = np.append(ids, np.int32(chunk.next_id))
        plan = self._planner.plan(request.table, tokens)
        return self._layers.begin(tokens, plan, ids, prompt_tokens=request.prompt_tokens)

    def _resumed(self, request: RankRequest, chunk: ring_pb2.RingChunk) -> ChunkWork:
        work, request.paused = request.paused, None
        assert work is not None, f"no chunk of {request.key} is paused here"
        assert work.tokens == span_from_pb(chunk.tokens), f"{work.tokens} are paused, not {chunk.tokens}"
        return work

    def _close(self, key: str, *, abort: bool) -> None:
        request = self._requests[key]
        request.closing = True
        request.relay = None  # nothing more leaves; a hand-off that was sealed ends by itself
        request.paused = None
        if abort and request.writer is not None:
            request.writer.abort("the prefill node ended this request")

    def _report(self, step_id: int, ran: _Ran) -> ring_pb2.RankReport:
        report = ring_pb2.RankReport(
            step_id=step_id,
            rank=self._rank,
            stopped=ran.leave is Leave.STOP,
            layers_left=ran.layers_left if ran.leave is Leave.PAUSE else None,
            prompt_logprobs=map(prompt_logprobs_to_pb, ran.prompt_logprobs),
        )
        for request in list(self._requests.values()):
            failure = None if request.writer is None else request.writer.failure
            if failure is not None and not request.failure_told:
                request.failure_told = True
                report.failed[request.key] = failure
            if request.closing and self._is_drained(request):
                report.drained.append(request.key)
                del self._requests[request.key]
        if self.copier is not None:
            report.copied.extend(self.copier.take_done())
        self._counters.values["relay_pending"] = float(
            sum(request.relay is not None and request.relay.pending for request in self._requests.values())
        )
        self._counters.values[TRANSFER_STUCK] = self._transfer_stuck_s()
        if self._fetcher is not None:
            self._fetcher.report(report)
        for counters in (self._counters, *self._more_counters):
            report.counters.update(counters.values.copy())
        return report

    def _is_drained(self, request: RankRequest) -> bool:
        """Nothing that is under way touches its pages: a chunk of a request that was given up may still write them."""
        has_ended = self._queue is None or self._queue.has_ended(request.last_chunk)
        return has_ended and (request.writer is None or request.writer.sources_free)


def _fill(table: PageTable, runs: Sequence[ring_pb2.OwnedRun]) -> None:
    for run in runs:
        table.fill(prompt_page=run.prompt_page, rank=run.rank, first_page=run.first_page, num_pages=run.num_pages)
