"""When a prefill node takes itself for stalled."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.prefill_node.health import STALL_S, StallWatch


def test_only_work_that_waits_while_nothing_moves_is_a_stall_and_progress_ends_it() -> None:
    clock, layers, has_work = ManualClock(), [0.0], [False]
    watch = StallWatch(mark=lambda: (layers[0],), has_work=lambda: has_work[0], clock=clock)

    clock.advance(2 * STALL_S)
    told = [(watch.check(), watch.stalled)]  # nothing to do is no stall
    has_work[0] = True
    clock.advance(STALL_S + 1)
    told += [(watch.check(), watch.stalled), (watch.check(), watch.stalled)]
    layers[0] += 1
    told += [(watch.check(), watch.stalled)]

    assert told == [(False, False), (True, True), (False, True), (True, False)]
