"""One rank's compute: it obeys ring steps, and knows of each request only what the steps told.

Shapes in this file: T own tokens of the chunk, D hidden, N heads, K query/key width, Y elements of a stored row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.core.health import StuckS
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, PromptLogprobs
from kvrelay.kernels.rope import RopeTables
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.prefill_step import project_and_store
from kvrelay.model.transformer import Layer, Model
from kvrelay.prefill_node.chunk_plan import ChunkPlan, ChunkPlanner
from kvrelay.prefill_node.device_queue import DeviceQueue, TimedChunk, to_device
from kvrelay.prefill_node.group import Header
from kvrelay.prefill_node.host_copier import HostCopier
from kvrelay.prefill_node.jobs import job_key
from kvrelay.prefill_node.late_relay import LateRelay
from kvrelay.prefill_node.prompt_logprobs import score
from kvrelay.prefill_node.rank_request import Fetcher, RankRequest, Writer
from kvrelay.prefill_node.relay import Relay
from kvrelay.prefill_node.relay_stream import RelayStream
from kvrelay.prefill_node.ring import Kept, Ring
from kvrelay.prefill_node.ring_plan import PageTable
from kvrelay.proto.convert import prompt_logprobs_to_pb, span_from_pb, unpack_ids
from kvrelay.proto.v1 import handoff_pb2, ring_pb2

LateTicket = Callable[[str], handoff_pb2.Ticket | None]  # of a request, once it is there

TRANSFER_STUCK = "transfer_stuck_s_max"  # a counter of every rank: see TransferThread.stuck_s


@dataclass(frozen=True, slots=True)
class StepResult:
    report: ring_pb2.RankReport
    timed: Sequence[TimedChunk] | None  # chunks that a device has ended; None: this step's chunk has, whatever it took
    logits_V: Tensor | None = None  # after the last token of a prompt; rank 0 only


@dataclass(frozen=True, slots=True)
class _Ran:
    """What came of one chunk on this rank."""

    stopped: bool = False
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
        self._ring = ring
        self._open_writer = open_writer
        self._planner = planner
        self._counters = counters
        self._fetcher: Fetcher | None = None
        self._more_counters = more_counters
        self._transfer_stuck_s = transfer_stuck_s
        self.late_ticket: LateTicket = lambda _: None  # set before the first step where tickets may come late
        self.copier: HostCopier | None = None  # set before the first step when host memory is behind the cache
        self._requests: dict[str, RankRequest] = {}
        self._queue = DeviceQueue.of(pool.device)
        self._stream = RelayStream(pool.device)
        # Without others to wait for, a device gets a whole layer before what leaves beside it.
        self._layer_first = self._stream.runs_beside and ring.size == 1

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
    def run(self, step: ring_pb2.RingStep, should_stop: Callable[[], bool]) -> StepResult:
        """Do one step. `should_stop` is asked once per layer, and heeded on rank 0 only."""
        for copy in step.copies:
            assert self.copier is not None, "rank 0 and this rank have the same setting"
            self.copier.obey(copy, rank=self._ring.rank)
        if self._fetcher is not None:
            self._fetcher.obey(step)
        for opened in step.opens:
            self._open(opened)
        for push in step.pushes:
            self._open_push(push)
        ran = _Ran()
        if step.HasField("chunk"):
            ran = self._run_chunk(step.step_id, step.chunk, should_stop)
        for key in step.closes:
            self._close(key, abort=key in step.aborts)
        with self._stream.behind(self._stream.mark()):
            for request in self._requests.values():
                if (relay := self._relay_now(request)) is not None:
                    relay.pump()
        timed = None if self._queue is None else self._queue.take_timed()
        return StepResult(self._report(step.step_id, ran), timed, ran.logits_V)

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
            self._relay(request, opened.ticket).queue_cached(opened.cached_tokens)
        elif opened.ticket_follows:
            request.relay = LateRelay()
        self._requests[key] = request

    def _open_push(self, push: ring_pb2.RingPush) -> None:
        ticket = push.ticket
        table = PageTable(prompt_tokens=ticket.prompt_tokens, page_tokens=self._pool.layout.page_tokens)
        _fill(table, push.pages)
        request = RankRequest(push.key, ticket.prompt_tokens, ticket.prompt_tokens, table, is_push=True)
        relay = self._relay(request, ticket)
        relay.queue_cached(ticket.prompt_tokens)
        with self._stream.behind(self._stream.mark()):
            relay.seal(first_token=None, cached_tokens=0)
        self._requests[push.key] = request

    def _relay_now(self, request: RankRequest) -> Relay | LateRelay | None:
        """Return the relay of a request, begun now if its ticket has just come. Inside `RelayStream.behind`."""
        late = request.relay
        if isinstance(late, LateRelay) and (ticket := self.late_ticket(request.key)) is not None:
            relay = self._relay(request, ticket)
            relay.queue_cached(request.cached_tokens)
            late.pass_to(relay)
        return request.relay

    def _relay(self, request: RankRequest, ticket: handoff_pb2.Ticket) -> Relay:
        request.writer = self._open_writer(ticket)
        request.relay = relay = Relay(
            request.writer,
            request.table,
            rank=self._ring.rank,
            resident_tokens=ticket.resident_tokens,
            num_layers=self._pool.layout.num_layers,
        )
        return relay

    def _run_chunk(self, step_id: int, chunk: ring_pb2.RingChunk, should_stop: Callable[[], bool]) -> _Ran:
        """Compute one chunk; the logits after the prompt's last token come from rank 0."""
        request = self._requests[chunk.request_id]
        tokens = span_from_pb(chunk.tokens)
        _fill(request.table, chunk.new_pages)
        plan = self._planner.plan(request.table, tokens)
        ids = unpack_ids(chunk.packed_ids)
        if self._queue is not None:
            self._queue.begin()
        hidden_TD = self._compute(step_id, request, tokens, plan, ids, should_stop)
        if self._queue is not None:
            request.last_chunk = self._queue.end(tokens, stopped=hidden_TD is None)
        if hidden_TD is None:
            return _Ran(stopped=True)
        self._counters.add("chunks")
        self._counters.add("prefill_tokens_executed", len(plan.positions_T))
        scored: list[PromptLogprobs] = []
        if request.wants_logprobs:
            known = np.append(ids, np.int32(chunk.next_id)) if chunk.HasField("next_id") else ids
            scored = score(self._model, hidden_TD, plan.positions_T, known, first_position=tokens.start)
        logits_V = None
        if chunk.is_last and self._ring.rank == 0:  # owns the last token; seals once the first token is chosen
            logits_V = self._model.logits(hidden_TD[-1:])[0]
        elif chunk.is_last and request.relay is not None:
            request.relay.seal(first_token=None, cached_tokens=0)
        return _Ran(logits_V=logits_V, prompt_logprobs=scored)

    def _compute(
        self,
        step_id: int,
        request: RankRequest,
        chunk: Span,
        plan: ChunkPlan,
        ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        should_stop: Callable[[], bool],
    ) -> Tensor | None:
        """Return hidden_TD after the last layer (empty for a rank without rows), or None when the ring stopped."""
        has_rows = len(plan.positions_T) > 0
        device = self._pool.device
        hidden_TD = torch.empty(0, device=device)
        q_TNK, stored_TY = None, self._pool.rows(0)[:0]
        if has_rows:
            own_ids = to_device(ids[plan.positions_T - chunk.start].astype(np.int64), device)
            hidden_TD = self._model.embed(own_ids)
            positions_T = to_device(plan.positions_T, device)
            # The base of dynamic NTK comes from the whole prompt, in every chunk and on every rank.
            rope = self._model.rope(positions_T, request.prompt_tokens)
        for index, layer in enumerate(self._model.layers):
            if has_rows:
                q_TNK, stored_TY = self._project(index, layer, hidden_TD, rope, plan.own_kept)
            final = None if request.relay is None else self._stream.mark()
            # The last layer's rows leave first of all: whoever decodes waits for them.
            layer_first = self._layer_first and index < len(self._model.layers) - 1
            if not layer_first:
                self._send_early(request, index, plan, final)
            header = Header(step_id, index, stop=self._ring.rank == 0 and should_stop())
            attended, stop = self._ring.attend(
                layer, q_TNK, stored_TY, plan.laps, header=header, scale=self._model.softmax_scale
            )
            if stop:
                return None
            relay = request.relay
            if relay is not None and (plan.late or relay.pending):
                # Rows from other ranks are there once the ring has passed; without any, nothing waits for attention.
                with self._stream.behind(self._stream.mark() if plan.late else None):
                    relay.rows_final(index, plan.late)
                    relay.pump()
            self._pump_pushes()
            if has_rows:
                hidden_TD = layer.finish(hidden_TD, attended.out_TNV.to(hidden_TD.dtype))
            if layer_first:
                self._send_early(request, index, plan, final)
            self._counters.add("layers")
        return hidden_TD

    def _send_early(self, request: RankRequest, layer: int, plan: ChunkPlan, final: torch.cuda.Event | None) -> None:
        """Send own rows of a layer, which are there when `final` is reached."""
        if request.relay is not None:
            with self._stream.behind(final):
                relay = self._relay_now(request)
                assert relay is not None, "it was there just now"
                relay.rows_final(layer, plan.early)

    def _pump_pushes(self) -> None:
        """Send a portion of each push: another node waits for them, and a chunk may take seconds."""
        pending = [one.relay for one in self._requests.values() if one.is_push and one.relay and one.relay.pending]
        if pending:
            with self._stream.behind(self._stream.mark()):
                for relay in pending:
                    relay.pump()

    def _project(
        self, index: int, layer: Layer, hidden_TD: Tensor, rope: RopeTables, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        """Return own queries q_TNK and rows_TY as pages hold them, after storing those that stay here."""
        if kept is not None and kept.rows is None:
            return project_and_store(layer, hidden_TD, rope, self._pool, index, kept.slots)
        projected = layer.project(hidden_TD, rope)
        stored_TY = self._pool.stored(projected.rows_TW)
        if kept is not None:
            self._pool.write_stored(index, kept.slots, kept.of(stored_TY))
        return projected.q_TNK, stored_TY

    def _close(self, key: str, *, abort: bool) -> None:
        request = self._requests[key]
        request.closing = True
        request.relay = None  # nothing more leaves; a hand-off that was sealed ends by itself
        if abort and request.writer is not None:
            request.writer.abort("the prefill node ended this request")

    def _report(self, step_id: int, ran: _Ran) -> ring_pb2.RankReport:
        report = ring_pb2.RankReport(
            step_id=step_id,
            rank=self._ring.rank,
            stopped=ran.stopped,
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
