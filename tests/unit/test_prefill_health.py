"""When a prefill node takes its steps for stuck."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.prefill_node.health import StepProgress


def test_only_work_that_waits_while_nothing_moves_is_a_stall_and_progress_ends_it() -> None:
    clock, layers, has_work = ManualClock(), [0.0], [False]
    steps = StepProgress(mark=lambda: (layers[0],), has_work=lambda: has_work[0], clock=clock)

    clock.advance(20)
    told = [steps.stuck_s()]  # nothing to do is no stall
    has_work[0] = True
    clock.advance(11)
    told += [steps.stuck_s(), steps.stuck_s()]
    layers[0] += 1
    told += [steps.stuck_s()]

    assert told == [0.0, 11.0, 11.0, 0.0]
