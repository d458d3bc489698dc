"""Whether the ring moves."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.clock import Clock, monotonic


class StepProgress:
    """For how long work has waited while nothing moved. `stuck_s` is called on one thread."""

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

    def stuck_s(self) -> float:
        mark, now_s = self._read_mark(), self._clock()
        if mark != self._mark or not self._has_work():
            self._mark, self._moved_s = mark, now_s
        return now_s - self._moved_s
