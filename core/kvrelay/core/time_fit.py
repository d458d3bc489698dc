"""What work costs, from the times that it took: time = start + first * x + second * y, no coefficient negative. Pure.

Least squares of the relative error, the past fading, so that a thousand short pieces of work weigh no less than a few
long ones and a device that has become slower is believed after some hundred pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from kvrelay.core.clock import Clock, monotonic

_FADE = 0.99  # of what was seen, per observation
_WARM_UP = 2  # the first pieces of work also load and compile things
_ENOUGH = 16
_EVERY = 8  # observations between two solutions ...
_MOST_S = 1.0  # ... unless the last one is older than this
_FIRST_IS_LIKELIER = (1e-3, 1e-6, 1e-4)  # how little is believed in each coefficient, when they cannot be told apart
_START_IS_LIKELIER = (1e-6, 1e-3, 1e-4)


@dataclass(frozen=True, slots=True)
class Fitted:
    start_s: float
    first_s: float  # per unit of x
    second_s: float  # per unit of y
    observations: int
    at_s: float = 0.0  # when it was solved, on the clock of its `TimeFit`

    def first_in_pieces_s(self, x: float) -> float:
        """Return the time per unit of x, the start of each piece of size `x` spread over it."""
        return self.first_s + self.start_s / x


class TimeFit:
    """Fed by one thread; `fitted` may be read by any."""

    def __init__(self, *, prefer_start: bool = False, clock: Clock = monotonic) -> None:
        """`prefer_start`: while all work was alike its time is put down to the start, not to the first measure."""
        self._ridge = np.diag(_START_IS_LIKELIER if prefer_start else _FIRST_IS_LIKELIER)
        self.fitted: Fitted | None = None  # None until enough was seen
        self._moments = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._observations = 0
        self._clock = clock

    def observe(self, took_s: float, *, x: float, y: float) -> None:
        """Take the time of one piece of work of this size."""
        if took_s <= 0.0:
            return
        self._observations += 1
        if self._observations <= _WARM_UP:
            return
        row = np.array((1.0, x, y)) / took_s  # so that every target is 1
        self._moments = _FADE * self._moments + np.outer(row, row)
        self._targets = _FADE * self._targets + row
        if self._observations >= _ENOUGH and self._is_due():
            start_s, first_s, second_s = _solve(self._moments, self._targets, self._ridge)
            self.fitted = Fitted(start_s, first_s, second_s, self._observations, self._clock())

    def _is_due(self) -> bool:
        """Say whether to solve now. Work that comes seldom counts at once: it may be all that a bad fit ever gets."""
        if self.fitted is None or self._observations % _EVERY == 0:
            return True
        return self._clock() - self.fitted.at_s >= _MOST_S


def _solve(moments: np.ndarray, targets: np.ndarray, ridge: np.ndarray) -> tuple[float, float, float]:
    """Return the best coefficients that are not negative: of three there are few enough supports to try them all."""
    scale = np.sqrt(np.maximum(np.diag(moments), 1e-300))
    scaled = moments / np.outer(scale, scale) + ridge
    wanted = targets / scale
    best, best_error = np.zeros(3), 0.0
    for size in (1, 2, 3):
        for support in map(list, combinations(range(3), size)):
            found = np.linalg.solve(scaled[np.ix_(support, support)], wanted[support])
            error = -float(found @ wanted[support])  # of the squares, up to what all supports have in common
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(3), error
                best[support] = found
    coefficients = best / scale
    return float(coefficients[0]), float(coefficients[1]), float(coefficients[2])
