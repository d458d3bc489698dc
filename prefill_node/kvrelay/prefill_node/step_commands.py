"""What other threads want of the step thread of rank 0, and how long that waits for it when there is nothing to do."""

from __future__ import annotations

import queue
from collections.abc import Callable

from kvrelay.prefill_node.control import RingControl

IDLE_TICK_S = 2.0  # keeps the ring's waits under the group timeout
FILL_TICK_S = 0.02  # while other ranks fetch; what they report comes with a step
COPY_TICK_S = 0.002  # of a ring whose ranks copy to or from host memory: only steps bring their reports
BUSY_TICK_S = 0.05  # first wait while closes or waits for room are pending; longer and longer while nothing changes


class StepCommands:
    """`put` may be called from any thread, the rest from the step thread."""

    def __init__(self, control: RingControl, *, is_ring: bool) -> None:
        """`is_ring`: there are other ranks, which report with a step only."""
        self._control = control
        self._is_ring = is_ring
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._tick_s = BUSY_TICK_S

    def put(self, command: Callable[[], object]) -> None:
        """Have something done between two steps."""
        self._queue.put(command)

    @property
    def any_waiting(self) -> bool:
        return not self._queue.empty()

    def take(self, *, busy: bool) -> None:
        """Do what was put; when there is nothing, and nothing to do otherwise, wait for it.

        Args:
            busy: the next step has something to do whatever the control says.
        """
        wait_s = self._wait_s(busy)
        try:
            command = self._queue.get(timeout=wait_s) if wait_s != 0 else self._queue.get_nowait()
            while True:
                command()
                command = self._queue.get_nowait()
        except queue.Empty:
            return

    def _wait_s(self, busy: bool) -> float | None:
        """Return how long to wait for a command before the next step; None = until one comes."""
        control = self._control
        if busy or control.wants_step:
            self._tick_s = BUSY_TICK_S
            return 0
        if control.is_copying:
            return COPY_TICK_S if self._is_ring else BUSY_TICK_S  # alone, the end of a copy wakes this thread
        if self._is_ring and control.fills.num_under_way:
            return FILL_TICK_S
        if (
            control.closing_jobs
            or control.queued_jobs
            or control.pushes.num_closing
            or (self._is_ring and len(control.fills))
        ):
            # What is awaited comes with a command, but for what the other ranks report: that needs a step.
            tick_s, self._tick_s = self._tick_s, min(2 * self._tick_s, IDLE_TICK_S)
            return tick_s
        return IDLE_TICK_S if self._is_ring else None
