"""The step thread of rank 0: takes commands between steps, plans, runs, samples, and says what came of it.

Commands arrive from the asyncio and lease threads through one queue; what happens to a job goes to the job's own sink,
which is called on this thread and must only hand the event over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import RequestCancelledError, ServeError, TransferError
from kvrelay.core.time_fit import TimeFit
from kvrelay.core.types import Counters
from kvrelay.prefill_node import jobs
from kvrelay.prefill_node.chunk_watch import ChunkWatch
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.fills import FillOrder
from kvrelay.prefill_node.first_token import first_token
from kvrelay.prefill_node.group import RingGroup
from kvrelay.prefill_node.job_events import Done, Failed, FirstToken, JobEvent, Progress, Sink, Started
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.load import Load
from kvrelay.prefill_node.prompt_logprobs import join
from kvrelay.prefill_node.pushes import Push
from kvrelay.prefill_node.rank import RankWorker, StepResult
from kvrelay.prefill_node.step_commands import StepCommands
from kvrelay.proto.v1 import handoff_pb2, ring_pb2

_FIRST_TOKEN_PAUSE_S = 0.0005  # what follows keeps the interpreter from those who pass the token and its manifest on

FillSink = Callable[[jobs.FillEnded], object]
CacheListener = Callable[[jobs.CacheChanged], object]


class Leader:
    """Owns control, worker and ring. `run` is the thread's body; other methods may be called from any thread."""

    def __init__(
        self,
        control: RingControl,
        worker: RankWorker,
        group: RingGroup | None,
        *,
        token_bytes: int,
        on_cache: CacheListener,
        counters: Counters,
        give_way_s: float = 0.0,
        clock: Clock = monotonic,
    ) -> None:
        """
        Args:
            token_bytes: bytes that one relayed token has in all layers.
            on_cache: told of every change of the prefix cache, on this thread.
            counters: of rank 0.
            give_way_s: see `ChunkWatch`.
        """
        self.load = Load()
        self.rank_counters: list[dict[str, float]] = []
        self._control = control
        self._worker = worker
        self._group = group
        self._token_bytes = token_bytes
        self._on_cache = on_cache
        self._counters = counters
        self._clock = clock
        self._commands = StepCommands(control, is_ring=group is not None)
        self._watch = ChunkWatch(
            control,
            is_ring=group is not None,
            give_way_s=give_way_s,
            any_command=lambda: self._commands.any_waiting,
            reached=worker.has_reached,
            counters=counters,
            clock=clock,
        )
        self._sinks: dict[str, Sink] = {}
        self._fill_sinks: dict[str, FillSink] = {}
        self._jobs: dict[str, Job] = {}
        self._planned_s = 0.0
        self._planned: list[jobs.Event] = []  # what came of the plan of the step in work, and is not told yet
        self._opened_s: dict[str, float] = {}
        self._tickets: dict[str, handoff_pb2.Ticket] = {}  # that came late; put there by any thread, as in a set
        self._shut_down = threading.Event()
        self._relay_pending = False
        self._ended_at_prefill: list[str] = []

    @property
    def chunk_times(self) -> TimeFit:
        """Return what chunks cost; x: tokens of a chunk, y: (token, visible token) pairs."""
        return self._watch.times

    def submit(self, job: Job, sink: Sink) -> None:
        """Queue a job; refusals arrive at the sink too. A longer one's chunk that is in work may give way to it."""
        self._watch.arriving[job.key] = job  # a dict's and a set's single operations are atomic
        self._commands.put(lambda: self._submit(job, sink))

    def push(self, push: Push, sink: Sink) -> None:
        """Have cached blocks written into another node's pages; the sink hears once how that ended: Done, or Failed."""
        self._commands.put(lambda: self._push(push, sink))

    def fill(self, order: FillOrder, sink: FillSink) -> None:
        """Have blocks fetched from another node; the sink hears once how that ended."""
        self._commands.put(lambda: self._fill(order, sink))

    def give_up_fill(self, key: str, reason: str) -> None:
        """End a fill early; legal at any time."""
        self._commands.put(lambda: self._control.give_up_fill(key, reason))

    def give_ticket(self, key: str, ticket: handoff_pb2.Ticket) -> None:
        """Bring the ticket of a submitted job; a chunk of it that is in work sees it at its next layer."""
        self._tickets[key] = ticket
        self._commands.put(lambda: None if key in self._jobs else self._tickets.pop(key, None))

    def fail(self, key: str, error: ServeError) -> None:
        """End a job with an error; unknown keys are ignored."""
        self._commands.put(lambda: self._fail(key, error))

    def cancel(self, key: str, reason: str) -> None:
        """End a job or a push; a chunk of it that is in work stops at its next layer. Unknown keys are ignored."""
        self._watch.cancelled.add(key)
        self._commands.put(lambda: self._cancel(key, reason))

    def call(self, command: Callable[[RingControl], None]) -> None:
        """Run something on this thread between two steps."""
        self._commands.put(lambda: command(self._control))

    def wake(self) -> None:
        """Look at the hand-offs again now."""
        self._commands.put(lambda: None)

    def shut_down(self) -> None:
        """Tell every rank to exit after one more step, and end `run`."""
        self._shut_down.set()
        self.wake()

    def progress_mark(self) -> tuple[float, float]:
        """Return numbers that change whenever a step makes progress."""
        return self._counters.values.get("steps", 0.0), self._counters.values.get("layers", 0.0)

    def run(self) -> None:
        """Step until shut down.

        Raises:
            RingError, RuntimeError: a rank is lost; this process must exit.
        """
        self._worker.bind_thread()
        self._worker.take_late_tickets(self._take_ticket)
        self._note_load()
        while True:
            self._commands.take(busy=self._relay_pending or self._shut_down.is_set())
            self._planned_s = self._clock()
            step = self._control.plan(self._planned_s)
            step.shutdown = self._shut_down.is_set()
            self._planned = self._control.take_events()
            self._note_load(computing=step.HasField("chunk"))
            self._run_step(step)
            self._note_load()
            if step.shutdown:
                self._worker.close()
                return

    def _run_step(self, step: ring_pb2.RingStep) -> None:
        if self._group is not None:
            self._group.broadcast(step.SerializeToString())
        key = step.chunk.request_id
        # Whoever hears what came of the plan wants the interpreter, and so does the launching of the first layer, for
        # which a device waits.
        self._watch.begin(step, self._tell_planned)
        result = self._worker.run(step, self._watch.ask)
        self._tell_planned()
        self._counters.add("steps")
        # Before the other reports are in: every rank leaves a chunk at the same layer, so it is complete. But the
        # client is told of its prompt first when it asked for that.
        is_scored = key in self._jobs and self._jobs[key].sampling.prompt_logprobs
        if not is_scored:
            self._choose_first_token(key, result)
        reports = [result.report]
        if self._group is not None:
            reports += [ring_pb2.RankReport.FromString(message) for message in self._group.gather()]
        if is_scored:
            if (scored := join(reports)) is not None:
                self._tell(key, scored)
            self._choose_first_token(key, result)
        turn = self._watch.end(reports, result.timed)
        self.rank_counters = [dict(report.counters) for report in reports]
        self._relay_pending = any(report.counters["relay_pending"] for report in reports)
        events = self._control.applied(reports, turn)
        # After the step was applied, so that the last chunk of a request that ends here is committed like any other;
        # before its events, because a hand-off that failed meanwhile is no failure of a request that needs none.
        for ended in self._ended_at_prefill:
            self._end(ended, Done(0), "the first token ended the request")
        self._ended_at_prefill.clear()
        self._deliver(events)
        for settled in self._worker.take_settled():
            self._finish(settled, Done(self._relayed_bytes(settled)), abort=False)

    def _choose_first_token(self, key: str, result: StepResult) -> None:
        """Sample when the prompt's last chunk was computed."""
        if result.logits_V is None:
            return
        try:
            chosen, reason = first_token(self._jobs[key], result.logits_V)
        except ServeError as err:
            self._end(key, Failed(err), str(err))
            return
        relay = self._worker.relay_of(key)
        compute_s = self._clock() - self._opened_s.pop(key)
        if reason is not None or relay is None:
            self._ended_at_prefill.append(key)
        else:  # before the client is told: its second token waits for this
            relay.seal(first_token=chosen, cached_tokens=self._control.cached_tokens(key))
        self._tell(key, FirstToken(chosen, reason, compute_s))
        if self.load.active_jobs == 1:  # nobody else waits for this thread
            time.sleep(_FIRST_TOKEN_PAUSE_S)

    def _tell_planned(self) -> None:
        planned, self._planned = self._planned, []
        self._deliver(planned)

    def _deliver(self, events: list[jobs.Event]) -> None:
        for event in events:
            match event:
                case jobs.Opened():
                    self._opened_s[event.key] = self._planned_s
                    self._tell(event.key, Started(event.cached_tokens, event.queue_s * 1e3))
                case jobs.Computed():
                    self._tell(event.key, Progress(event.tokens))
                case jobs.HandoffFailed():
                    self._end(event.key, Failed(TransferError(event.reason)), event.reason)
                case jobs.CacheChanged():
                    self._on_cache(event)
                case jobs.FillEnded():
                    self._fill_sinks.pop(event.key)(event)
                case jobs.Gone():
                    self._watch.forget(event.key)
                    self._jobs.pop(event.key, None)
                    self._opened_s.pop(event.key, None)
                    self._tickets.pop(event.key, None)

    def _submit(self, job: Job, sink: Sink) -> None:
        self._watch.arriving.pop(job.key, None)
        try:
            self._control.submit(job, self._clock())
        except ServeError as err:
            sink(Failed(err))
            return
        self._jobs[job.key] = job
        self._sinks[job.key] = sink

    def _push(self, push: Push, sink: Sink) -> None:
        try:
            self._control.pushes.begin(push)
        except ServeError as err:
            sink(Failed(err))
            return
        self._sinks[push.key] = sink

    def _fill(self, order: FillOrder, sink: FillSink) -> None:
        if self._control.begin_fill(order):
            self._fill_sinks[order.key] = sink
        else:
            sink(jobs.FillEnded(order.key))

    def _cancel(self, key: str, reason: str) -> None:
        if self._control.phase_of(key) is None:
            self._watch.forget(key)
            return
        self._end(key, Failed(RequestCancelledError(reason)), reason)

    def _fail(self, key: str, error: ServeError) -> None:
        if key in self._sinks:
            self._end(key, Failed(error), str(error))

    def _take_ticket(self, key: str) -> handoff_pb2.Ticket | None:
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            self._jobs[key] = replace(self._jobs[key], ticket=ticket)
        return ticket

    def _end(self, key: str, event: JobEvent, reason: str) -> None:
        """Give up what is left of a job's hand-off and let its pages go."""
        self._worker.abort(key, reason)
        self._finish(key, event, abort=True)

    def _finish(self, key: str, event: JobEvent, *, abort: bool) -> None:
        """Tell a job its last event and let its pages go."""
        self._tell(key, event)
        self._sinks.pop(key, None)
        self._control.close(key, abort=abort)

    def _tell(self, key: str, event: JobEvent) -> None:
        if (sink := self._sinks.get(key)) is not None:
            sink(event)

    def _relayed_bytes(self, key: str) -> int:
        job = self._jobs.get(key)
        return 0 if job is None else job.relayed_tokens * self._token_bytes

    def _note_load(self, *, computing: bool = False) -> None:
        self.load = Load.of(self._control, computing=computing)
