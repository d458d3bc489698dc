from __future__ import annotations

import pytest

from kvrelay.core.types import FinishReason
from kvrelay.decode_node.scheduler import DecodeScheduler, Sequence


def a_sequence(key: int, *, tokens_left: int = 10, stop_ids: tuple[int, ...] = ()) -> Sequence:
    return Sequence(key, position=100, last_token=7, tokens_left=tokens_left, stop_ids=frozenset(stop_ids))


def keys(scheduler: DecodeScheduler) -> list[int]:
    return [sequence.key for sequence in scheduler.plan()]


def test_all_running_sequences_are_in_the_step() -> None:
    scheduler = DecodeScheduler(max_batch=4)
    for key in (1, 2, 3):
        scheduler.join(a_sequence(key))
    assert keys(scheduler) == [1, 2, 3]
    assert keys(scheduler) == [1, 2, 3], "planning changes nothing"


def test_a_token_moves_its_sequence_one_position_on() -> None:
    scheduler = DecodeScheduler(max_batch=4)
    scheduler.join(a_sequence(1))
    assert scheduler.take(1, 42) is None
    (sequence,) = scheduler.plan()
    assert (sequence.position, sequence.last_token, sequence.tokens_left) == (101, 42, 9)


def test_a_sequence_ends_at_a_stop_id_and_leaves() -> None:
    scheduler = DecodeScheduler(max_batch=4)
    scheduler.join(a_sequence(1, stop_ids=(42,)))
    assert scheduler.take(1, 41) is None
    assert scheduler.take(1, 42) is FinishReason.STOP
    assert len(scheduler) == 0


def test_a_sequence_ends_when_its_tokens_are_used_up() -> None:
    scheduler = DecodeScheduler(max_batch=4)
    scheduler.join(a_sequence(1, tokens_left=2))
    assert scheduler.take(1, 5) is None
    assert scheduler.take(1, 5) is FinishReason.LENGTH


def test_a_stop_id_as_the_last_token_counts_as_stop() -> None:
    scheduler = DecodeScheduler(max_batch=4)
    scheduler.join(a_sequence(1, tokens_left=1, stop_ids=(5,)))
    assert scheduler.take(1, 5) is FinishReason.STOP


def test_sequences_take_turns_when_they_do_not_all_fit() -> None:
    scheduler = DecodeScheduler(max_batch=2)
    for key in range(5):
        scheduler.join(a_sequence(key))
    turns = []
    for _ in range(5):
        turns += keys(scheduler)
        for key in keys(scheduler):
            scheduler.take(key, 9)
    assert sorted(turns) == sorted([0, 1, 2, 3, 4] * 2)


def test_a_sequence_that_left_is_in_no_later_step_and_leaving_twice_is_harmless() -> None:
    scheduler = DecodeScheduler(max_batch=2)
    scheduler.join(a_sequence(1))
    assert scheduler.leave(1)
    assert not scheduler.leave(1)
    assert keys(scheduler) == []


def test_joining_twice_is_our_bug() -> None:
    scheduler = DecodeScheduler(max_batch=2)
    scheduler.join(a_sequence(1))
    with pytest.raises(AssertionError, match="running already"):
        scheduler.join(a_sequence(1))
