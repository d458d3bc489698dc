"""Time, as a seam. All waits, leases and deadlines use monotonic seconds of one process; wall time is for logs only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]  # monotonic seconds

MAX_TIME_LIMIT_S = (2**32 - 1) // 1000  # 49.7 days: what fits a message's 32 bits of milliseconds

monotonic: Clock = time.monotonic


@dataclass(slots=True)
class ManualClock:
    """A clock that only moves when told to; for tests and simulations."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        assert by_s >= 0, "monotonic time does not go back"
        self.now_s += by_s


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on one clock after which a wait is over."""

    at_s: float

    @classmethod
    def after(cls, timeout_s: float, clock: Clock = monotonic) -> Deadline:
        return cls(clock() + timeout_s)

    def remaining_s(self, clock: Clock = monotonic) -> float:
        return max(0.0, self.at_s - clock())

    def passed(self, clock: Clock = monotonic) -> bool:
        return clock() >= self.at_s
