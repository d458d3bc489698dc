"""Whether the threads of a node move: one that is stuck makes the node unfit to serve and to be found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from kvrelay.core.clock import Clock, monotonic

_CHECK_S = 0.5
log = logging.getLogger(__name__)

StuckS = Callable[[], float]  # for how long a thread has had work without progress; 0 while it moves or has none


class Beats:
    """Stuck seconds of a thread that must do something every `period_s`, whatever the traffic."""

    def __init__(self, *, period_s: float, clock: Clock = monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._last_s: float | None = None  # before the first beat the thread has not begun

    def beat(self) -> None:
        self._last_s = self._clock()

    def stuck_s(self) -> float:
        """Any thread."""
        last_s = self._last_s
        return 0.0 if last_s is None else max(0.0, self._clock() - last_s - self._period_s)


class ProgressWatch:
    """Notes threads that are stuck. `check` is called on the event loop, `stuck` is read by any thread."""

    def __init__(self, threads: Mapping[str, StuckS], *, limit_s: float) -> None:
        self._threads = threads
        self._limit_s = limit_s
        self.stuck: str | None = None  # which thread, and for how long

    def check(self) -> bool:
        """Look at every thread; return whether the node has become fit or unfit to serve."""
        name, longest_s = max(((name, ask()) for name, ask in self._threads.items()), key=lambda one: one[1])
        was_stuck = self.stuck is not None
        self.stuck = f"the {name} thread makes no progress for {longest_s:.0f} s" if longest_s > self._limit_s else None
        if (self.stuck is not None) == was_stuck:
            return False
        log.warning("serving: %s", f"no: {self.stuck}" if self.stuck else "yes, all threads move again")
        return True

    async def run(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Check until cancelled; `on_change` is called after fit has become unfit or the other way round."""
        while True:
            await asyncio.sleep(_CHECK_S)
            if self.check():
                await on_change()
