"""Exactly once in every layer, whatever the order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.shard import Span
from kvrelay.kv_transfer.coverage import Coverage

WANTED = Span(8, 40)


@st.composite
def partitions(draw: st.DrawFn) -> list[tuple[int, Span]]:
    parts: list[tuple[int, Span]] = []
    for layer in range(2):
        cuts = sorted(draw(st.sets(st.integers(9, 39))))
        edges = [8, *cuts, 40]
        parts += [(layer, Span(a, b)) for a, b in itertools.pairwise(edges)]
    return draw(st.permutations(parts))


@given(parts=partitions())
def test_a_partition_is_complete_with_its_last_part_and_not_before(parts: list[tuple[int, Span]]) -> None:
    coverage = Coverage(WANTED, num_layers=2)

    for layer, span in parts:
        assert not coverage.complete
        assert coverage.refusal(layer, span) is None
        coverage.add(layer, span)

    assert coverage.complete


@given(parts=st.lists(st.tuples(st.integers(0, 1), st.integers(8, 39), st.integers(1, 32)), max_size=12))
def test_complete_means_each_token_exactly_once(parts: list[tuple[int, int, int]]) -> None:
    coverage = Coverage(WANTED, num_layers=2)
    times: dict[tuple[int, int], int] = {}

    for layer, start, length in parts:
        span = Span(start, min(start + length, 40))
        if coverage.refusal(layer, span) is None:
            coverage.add(layer, span)
            for token in range(span.start, span.end):
                times[layer, token] = times.get((layer, token), 0) + 1

    exactly_once = times == {(layer, token): 1 for layer in range(2) for token in range(8, 40)}
    assert coverage.complete == exactly_once


def test_parts_outside_or_twice_are_refused_with_a_reason() -> None:
    coverage = Coverage(WANTED, num_layers=2)
    coverage.add(0, Span(8, 16))

    assert coverage.refusal(2, Span(8, 16)) == "layer 2 of 2"
    assert coverage.refusal(0, Span(0, 16)) == "tokens [0, 16) outside [8, 40)"
    assert coverage.refusal(0, Span(16, 16)) == "tokens [16, 16) outside [8, 40)"
    assert coverage.refusal(0, Span(8, 12)) == "tokens [8, 12) of layer 0 written twice"


def test_nothing_to_relay_is_complete_at_once() -> None:
    assert Coverage(Span(40, 40), num_layers=2).complete
