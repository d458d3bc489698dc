"""The counts of a node's parts, together."""

from __future__ import annotations

from kvrelay.core.types import counted_together


def test_what_has_one_name_is_added_up_and_of_what_is_a_maximum_the_largest_counts() -> None:
    assert counted_together([{"a": 1.0, "s_max": 2.0}, {"a": 3.0, "b": 4.0, "s_max": 1.0}]) == {
        "a": 4.0, "b": 4.0, "s_max": 2.0,
    }  # fmt: skip


def test_another_thread_may_count_something_new_meanwhile() -> None:
    part: dict[str, float] = {}

    class CountedMeanwhile(float):
        def __radd__(self, other: float) -> float:
            part["new"] = 1.0
            return other + float(self)

    part["a"], part["b"] = CountedMeanwhile(2.0), 3.0
    assert counted_together([part]) == {"a": 2.0, "b": 3.0}
