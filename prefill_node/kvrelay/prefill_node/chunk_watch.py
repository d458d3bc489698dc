"""What rank 0 says before each layer of the chunk in work, and what is learned of it: its time, and its pauses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.core.clock import Clock
from kvrelay.core.time_fit import TimeFit
from kvrelay.core.types import Counters
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.device_queue import TimedChunk
from kvrelay.prefill_node.giving_way import InWork, Turn, Waiting, favoured
from kvrelay.prefill_node.group import Leave
from kvrelay.prefill_node.jobs import Job
from kvrelay.proto.convert import span_from_pb
from kvrelay.proto.v1 import ring_pb2

_TOLD_IN_LAYER = 2  # of a chunk: what came of its plan
_LONGEST_STEP_S = 0.5  # while somebody waits for what only the end of a step brings


class ChunkWatch:
    """Used by the step thread of rank 0, but for `arriving` and `cancelled`, which any thread may change."""

    def __init__(
        self,
        control: RingControl,
        *,
        is_ring: bool,
        give_way_s: float,
        any_command: Callable[[], bool],
        reached: Callable[[], bool] = lambda: True,
        counters: Counters,
        clock: Clock,
    ) -> None:
        """
        Args:
            is_ring: there are other ranks, which hear within a layer that they leave behind it.
            give_way_s: least wait for which a chunk is paused; 0 = none is.
            any_command: whether something is to be done between two steps.
            reached: whether the chunk in work is what rank 0's device computes, and none that was launched before it.
        """
        self.times = TimeFit()  # x: tokens of a chunk, y: (token, visible token) pairs
        self.arriving: dict[str, Job] = {}  # submitted, and not known to the control yet
        self.cancelled: set[str] = set()
        self._control = control
        self._is_ring = is_ring
        self._give_way_s = give_way_s
        self._any_command = any_command
        self._reached = reached
        self._counters = counters
        self._clock = clock
        self._earlier_s: dict[str, float] = {}  # what a paused chunk has taken, on ranks that compute at once
        self._left_at_s: dict[str, float] = {}  # since when a chunk has been paused for others
        self._was_left: str | None = None  # by the last step
        self._begin(ring_pb2.RingStep(), lambda: None)

    def _begin(self, step: ring_pb2.RingStep, tell_planned: Callable[[], None]) -> None:
        self._chunk = step.chunk if step.HasField("chunk") else None
        self._tell_planned = tell_planned
        self._began_s = self._reached_s = self._clock()
        self._is_reached = True
        self._asked = 0
        self._num_layers = 1
        self._favoured: str | None = None
        self._waiting: list[Waiting] = []
        self._weighed: set[str] = set()  # of those that arrive

    def begin(self, step: ring_pb2.RingStep, tell_planned: Callable[[], None]) -> None:
        """Take in a step that is about to run. What came of its plan is told when a layer is under way."""
        self._begin(step, tell_planned)
        if self._chunk is None:
            return
        self._is_reached = self._reached()
        key = self._chunk.request_id
        self._waiting = self._control.scheduler.waiting_beside(key)
        left, self._was_left = self._was_left, None
        if left is not None and left != key:
            self._counters.add("chunk_pauses_total")
            self._left_at_s[left] = self._began_s
        if (since_s := self._left_at_s.pop(key, None)) is not None:
            self._counters.add("chunk_paused_s_total", self._began_s - since_s)

    def ask(self, layer: int, num_layers: int) -> Leave:
        """Say whether the ring leaves the chunk in work, which stands before a layer."""
        assert self._chunk is not None, "a layer is one of a chunk"
        self._asked += 1
        self._num_layers = num_layers
        if self._asked == _TOLD_IN_LAYER:
            self._tell_planned()
        if not self._is_reached and self._reached():
            self._reach()
        if self._chunk.request_id in self.cancelled:
            return Leave.STOP
        # At least one layer is computed at a time.
        layers_left = num_layers - layer - self._is_ring
        can_gain = self._give_way_s > 0 and self._asked > 1 and layers_left > 0
        return Leave.PAUSE if can_gain and self._gives_way(self._chunk, layers_left) else Leave.NO

    def end(self, reports: Sequence[ring_pb2.RankReport], timed: Sequence[TimedChunk] | None) -> Turn:
        """Take in what came of the step.

        Args:
            timed: chunks that a device has ended; None: this step's chunk has, as far as it was computed.
        """
        took_s = self._clock() - self._began_s
        if self._chunk is not None:
            if not self._is_reached:
                self._reach()
            key = self._chunk.request_id
            earlier_s = self._earlier_s.pop(key, 0.0)
            if any(report.HasField("layers_left") for report in reports):
                self._earlier_s[key] = earlier_s + took_s
                self._was_left = key
            elif timed is None and not any(report.stopped for report in reports):
                timed = [TimedChunk(span_from_pb(self._chunk.tokens), earlier_s + took_s)]
        for chunk in timed or ():
            self.times.observe(chunk.took_s, x=chunk.tokens.num_tokens, y=chunk.tokens.num_pairs)
        return Turn(self._clock() - self._reached_s, self._num_layers, self._favoured)

    def forget(self, key: str) -> None:
        """A request is gone."""
        self.cancelled.discard(key)
        self._earlier_s.pop(key, None)
        self._left_at_s.pop(key, None)
        if self._was_left == key:
            self._was_left = None

    def _reach(self) -> None:
        """Take what passed since the step began for time of the turn before: the device was still at that."""
        self._is_reached, self._reached_s = True, self._clock()
        self._control.scheduler.took_longer(self._reached_s - self._began_s)

    def _gives_way(self, chunk: ring_pb2.RingChunk, layers_left: int) -> bool:
        key, ran_s = chunk.request_id, self._clock() - self._began_s
        self._weigh_arriving()
        is_due = ran_s >= _LONGEST_STEP_S and (self._any_command() or self._control.awaits_step_end)
        if not (self._waiting or is_due) or not self._control.scheduler.may_pause(key):
            return False
        had_s = self._clock() - self._reached_s if self._is_reached else 0.0
        if had_s >= self._control.scheduler.owed_s(key):
            work = InWork(span_from_pb(chunk.tokens), self._num_layers, layers_left)
            self._favoured = favoured(work, self._waiting, fitted=self.times.fitted, least_wait_s=self._give_way_s)
        return self._favoured is not None or is_due

    def _weigh_arriving(self) -> None:
        """Let those count that have come since the step began, if they could begin now."""
        if len(self.arriving) == len(self._weighed):
            return
        for key, job in self.arriving.copy().items():
            if key not in self._weighed:
                self._weighed.add(key)
                if (tokens := self._control.would_compute(job)) is not None:
                    self._waiting.append(Waiting(key, tokens))
