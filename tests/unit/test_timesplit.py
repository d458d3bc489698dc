"""The parts of a request's time add up on the client's clock, whatever the nodes report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.clock import ManualClock
from kvrelay.router.timesplit import RequestTimer, TimeSplit

waits = st.floats(0, 100)
reports = st.floats(0, 1e6)


def _sums(split: TimeSplit) -> tuple[float, float]:
    first = split.queue_ms + split.tokenize_ms + split.place_ms + split.reserve_ms + split.prefill_ms
    second = split.exposed_relay_ms + split.verify_ms + split.admit_ms + split.first_step_ms
    return first + split.delivery_ms, second


@given(st.lists(waits, min_size=6, max_size=6), st.lists(reports, min_size=5, max_size=5))
def test_a4_parts_add_up_and_are_never_negative(steps: list[float], reported: list[float]) -> None:
    clock = ManualClock()
    timer = RequestTimer(clock)
    timer.tokenize_ms = reported[0]
    for step, mark in zip(steps, (timer.attempt_begins, timer.placed, timer.reserved), strict=False):
        clock.advance(step)
        mark()
    timer.prefill_ms, timer.exposed_relay_ms, timer.verify_ms, timer.admit_ms = reported[1:]
    for step in steps[3:5]:
        clock.advance(step)
        timer.tokens_left(1)
    clock.advance(steps[5])

    split = timer.split()

    to_first, to_second = _sums(split)
    assert to_first == pytest.approx(split.ttft_ms, abs=1e-6)
    assert to_second == pytest.approx(split.second_token_ms - split.ttft_ms, abs=1e-6)
    assert split.total_ms == pytest.approx(sum(steps) * 1e3)
    assert all(getattr(split, name) >= -1e-6 for name in split.__slots__)


def test_a_failed_attempt_counts_as_queueing() -> None:
    clock = ManualClock()
    timer = RequestTimer(clock)
    timer.attempt_begins()
    clock.advance(3.0)
    timer.placed()
    timer.attempt_begins()
    clock.advance(0.5)
    timer.placed()
    timer.reserved()
    clock.advance(1.0)
    timer.tokens_left(1)

    split = timer.split()

    assert (split.queue_ms, split.place_ms, split.ttft_ms) == (3000.0, 500.0, 4500.0)


def test_a_retry_after_the_first_token_does_not_rewrite_its_time() -> None:
    clock = ManualClock()
    timer = RequestTimer(clock)
    clock.advance(1.0)
    timer.attempt_begins()
    timer.placed()
    timer.tokens_left(1)
    before = timer.split()
    clock.advance(5.0)
    timer.attempt_begins()
    timer.placed()
    timer.tokens_left(1)

    split = timer.split()

    assert (split.ttft_ms, split.queue_ms) == (before.ttft_ms, before.queue_ms)
    assert split.second_token_ms == 6000.0


def test_a_first_message_with_several_tokens_marks_both() -> None:
    timer = RequestTimer(ManualClock(1.0))
    timer.attempt_begins()
    timer.tokens_left(5)

    assert timer.split().second_token_ms == 0.0
