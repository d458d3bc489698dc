"""When a node is unfit to serve because one of its threads makes no progress."""

from __future__ import annotations

from functools import partial

from kvrelay.core.clock import ManualClock
from kvrelay.core.health import Beats, ProgressWatch


def test_a_node_is_unfit_while_any_of_its_threads_is_stuck_and_says_which() -> None:
    stuck_s = {"step": 0.0, "transfer": 0.0}
    watch = ProgressWatch({name: partial(stuck_s.__getitem__, name) for name in stuck_s}, limit_s=10)

    told = [(watch.check(), watch.stuck)]
    stuck_s["step"] = 10.0
    told += [(watch.check(), watch.stuck)]
    stuck_s["transfer"] = 11.0
    told += [(watch.check(), watch.stuck), (watch.check(), watch.stuck)]
    stuck_s["transfer"] = 0.0
    told += [(watch.check(), watch.stuck)]

    stuck = "the transfer thread makes no progress for 11 s"
    assert told == [(False, None), (False, None), (True, stuck), (False, stuck), (True, None)]


def test_a_thread_that_must_beat_is_stuck_by_what_it_is_late_and_not_before_it_has_begun() -> None:
    clock = ManualClock()
    beats = Beats(period_s=2, clock=clock)
    clock.advance(100)
    told = [beats.stuck_s()]
    beats.beat()
    clock.advance(1.5)
    told += [beats.stuck_s()]
    clock.advance(3)
    told += [beats.stuck_s()]

    assert told == [0.0, 0.0, 2.5]
