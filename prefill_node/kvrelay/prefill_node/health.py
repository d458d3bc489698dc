"""Whether the ring moves: work that waits while nothing moves makes the node unfit to be found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvrelay.core.clock import Clock, monotonic

STALL_S = 10.0  # work waits and nothing moves for so long: NOT_SERVING, and no record in the registry
_CHECK_S = 1.0
log = logging.getLogger(__name__)


class StallWatch:
    """Notes stalls of the step thread. `check` is called on the event loop, `stalled` is read by any thread."""

    def __init__(
        self, *, mark: Callable[[], tuple[float, ...]], has_work: Callable[[], bool], clock: Clock = monotonic
    ) -> None:
        """
        Args:
            mark: returns numbers that change whenever the step thread makes progress.
            has_work: whether a step would make progress now.
        """
        self._read_mark = mark
        self._has_work = has_work
        self._clock = clock
        self._mark = mark()
        self._moved_s = clock()
        self.stalled = False

    def check(self) -> bool:
        """Look at the step thread's progress; return whether `stalled` has changed."""
        mark, now_s = self._read_mark(), self._clock()
        if mark != self._mark or not self._has_work():
            self._mark, self._moved_s = mark, now_s
        stalled = now_s - self._moved_s > STALL_S
        changed, self.stalled = stalled != self.stalled, stalled
        if changed:
            log.warning("serving: %s (no step progress for %.0f s)", not stalled, now_s - self._moved_s)
        return changed

    async def run(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Check until cancelled; `on_change` is called after `stalled` has changed."""
        while True:
            await asyncio.sleep(_CHECK_S)
            if self.check():
                await on_change()
