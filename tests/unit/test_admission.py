"""Who is refused, why, and when to ask again."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.router.admission import ROOM_FOR_OTHERS, TARGETS, Prospect, Refusal, Slo, Terms, judge


def judged(slo: Slo = Slo.STANDARD, *, left_s: float = 600.0, waiting: int = 0, **changes: Any) -> Refusal | None:
    plain = {"wait_s": 0.0, "compute_s": 1.0, "step_s": 0.01, "is_proven": True}
    return judge(Prospect(**(plain | changes)), Terms(slo, left_s), waiting=waiting, max_waiting=10)


def test_what_can_be_kept_is_let_in() -> None:
    assert judged() is None
    assert judged(wait_s=20.0) is None
    assert judged(compute_s=500.0) is None  # a long prompt is the client's choice


@pytest.mark.parametrize("slo", list(Slo))
def test_a_wait_beyond_the_class_is_refused_with_the_numbers_and_a_hint(slo: Slo) -> None:
    limit_s = ROOM_FOR_OTHERS * TARGETS[slo].wait_s
    refusal = judged(slo, wait_s=limit_s + 3.0, left_s=1e9)

    assert refusal is not None
    assert f"at most {limit_s:g} s" in refusal.reason
    assert refusal.retry_after_s == pytest.approx(3.0)
    assert judged(slo, wait_s=limit_s, left_s=1e9) is None


def test_a_deadline_that_the_queue_would_break_is_refused_before_any_work() -> None:
    refusal = judged(wait_s=5.0, compute_s=1.0, left_s=4.0)

    assert refusal is not None
    assert "deadline leaves 4 s" in refusal.reason
    assert judged(wait_s=5.0, compute_s=9.0, left_s=4.0) is None  # too long by itself: waiting is not what breaks it


def test_the_queue_is_bounded_by_count_whatever_is_known_of_the_nodes() -> None:
    assert judged(waiting=9, is_proven=False) is None
    refusal = judged(waiting=10, is_proven=False)

    assert refusal is not None
    assert "10 requests wait" in refusal.reason


def test_nobody_is_refused_on_the_word_of_a_node_that_was_never_seen_at_work() -> None:
    assert judged(wait_s=1e6, is_proven=False) is None


def test_a_full_decode_batch_refuses_those_who_were_promised_fast_tokens() -> None:
    assert judged(Slo.INTERACTIVE, step_s=0.06) is not None
    assert judged(Slo.STANDARD, step_s=0.06) is None
