"""Requirements of kvrelay.prefill_node.giving_way: who may pause whom."""

from __future__ import annotations

import pytest

from kvrelay.core.shard import Span
from kvrelay.core.time_fit import Fitted
from kvrelay.prefill_node.giving_way import InWork, Waiting, favoured

FITTED = Fitted(start_s=0.001, first_s=1e-5, second_s=1e-10, observations=99)
LEAST_S = 0.02


def way(chunk: InWork, *waiting: Waiting, fitted: Fitted | None = FITTED) -> str | None:
    return favoured(chunk, waiting, fitted=fitted, least_wait_s=LEAST_S)


def chunk(tokens: int = 32_000, *, start: int = 0, layers_left: int = 20) -> InWork:
    return InWork(Span(start, start + tokens), num_layers=27, layers_left=layers_left)


def short(tokens: int, name: str = "short", *, start: int = 0) -> Waiting:
    return Waiting(name, Span(start, start + tokens))


@pytest.mark.parametrize("fitted", [FITTED, None])
def test_a_long_chunk_gives_way_to_a_short_prompt_and_not_to_one_like_it(fitted: Fitted | None) -> None:
    assert way(chunk(), short(4000), fitted=fitted) == "short"
    assert way(chunk(), short(32_000), fitted=fitted) is None
    assert way(chunk(), fitted=fitted) is None


def test_it_is_what_is_left_of_the_chunk_that_counts() -> None:
    assert way(chunk(layers_left=26), short(12_000)) == "short"
    assert way(chunk(layers_left=8), short(12_000)) is None
    assert way(chunk(layers_left=0), short(1)) is None


def test_no_chunk_is_paused_for_a_gain_that_nobody_notices() -> None:
    assert way(chunk(1500, layers_left=26), short(10)) is None  # 16 ms
    assert way(chunk(1500, layers_left=26), short(10), fitted=None) == "short"  # as far as anybody knows


def test_the_cost_of_what_comes_before_counts_on_both_sides() -> None:
    # By tokens the first is no shorter, and the second is.
    assert way(chunk(10_000, start=900_000), short(8000)) == "short"
    assert way(chunk(), short(8000, start=900_000)) is None
    assert way(chunk(), short(8000, start=900_000), fitted=None) == "short"


def test_the_one_with_the_least_to_compute_is_favoured() -> None:
    assert way(chunk(), short(4000, "more"), short(3000, "less"), short(3500, "between")) == "less"
