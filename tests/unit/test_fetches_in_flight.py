"""The link of a node is shared by all who fetch from it at once."""

from __future__ import annotations

import pytest

from kvrelay.core.types import Incarnation
from kvrelay.index.reader import Confidence
from kvrelay.router.books import Books, Share
from kvrelay.router.cost import NodeCost
from kvrelay.router.decisions import explained
from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.placement import Load, Pair, place
from kvrelay.router.score import NO_LOAD
from placement_lab import asked, decode, prefill

PULLS, D = prefill("pulls", pulls=True), decode("d")
NEAR, FAR = decode("near"), decode("far", links={"pulls": 8e-6})
TOKEN_S = NodeCost().relay_token_s


def fetching(**in_flight: tuple[int, ...]) -> Pair:
    """Place a prompt that both decode nodes have; given are the fetches in flight from each."""
    nodes = {"near": NEAR, "far": FAR}
    return place(
        [PULLS, D, NEAR, FAR],
        asked(
            4000,
            cached_tokens=dict.fromkeys((NEAR.incarnation, FAR.incarnation), 3968),
            loads={nodes[name].incarnation: Load(fetches=tokens) for name, tokens in in_flight.items()},
        ),
    )


def test_a_fetch_takes_longer_by_what_others_fetch_from_there_meanwhile() -> None:
    alone, beside = fetching().pull, fetching(near=(1000,)).pull

    assert alone is not None
    assert beside is not None
    assert (alone.source, beside.source) == (NEAR, NEAR)
    assert alone.transfer_s == pytest.approx(0.01 + 3968 * TOKEN_S)
    assert beside.transfer_s == pytest.approx(0.01 + (3968 + 1000) * TOKEN_S)


def test_a_longer_one_takes_no_more_than_an_equal_part_of_the_link() -> None:
    pull = fetching(near=(90_000, 1000), far=(90_000, 90_000)).pull

    assert pull is not None
    assert pull.source == NEAR
    assert pull.transfer_s == pytest.approx(0.01 + (2 * 3968 + 1000) * TOKEN_S)


def test_a_source_that_many_fetch_from_is_left_for_another_one() -> None:
    pull = fetching(near=(4000,)).pull

    assert pull is not None
    assert pull.source == FAR


def test_when_too_many_fetch_it_is_computed_and_the_log_says_so() -> None:
    pair = fetching(near=(9000,) * 30, far=(9000,) * 30)

    assert pair.pull is None
    assert pair.remaining_tokens == 4000
    assert (
        "fetching 3968 tokens from near would take 0.625 s, 0.595 s of it by other fetches from there (30)" in pair.way
    )


def test_the_log_names_what_the_others_add() -> None:
    pair = fetching(near=(1000,))
    said = explained(pair, prompt_tokens=4000, confidence=Confidence.EXACT, cached={})
    parts = next(one.parts for one in said.candidates if one.name == "pulls")

    assert parts["fetch_s"] == pytest.approx(0.01 + 3968 * TOKEN_S)
    assert parts["fetch_shared_s"] == pytest.approx(1000 * TOKEN_S)
    assert "pull from near 3968 tokens in 0.0348 s, 0.005 s of it by other fetches from there (1)" in said.way


@pytest.mark.parametrize("end", ["fetched", "replan", "computed", "release"])
def test_a_fetch_is_in_flight_until_it_has_come_or_nobody_waits_for_it(end: str) -> None:
    books, pair = Books(), fetching()
    entries = [books.enter(pair, decode_pages=9, hashes=()) for _ in range(2)]
    assert books.loads()[NEAR.incarnation].fetches == (3968, 3968)

    if end == "replan":
        books.replan(entries[0], (Share(PULLS.incarnation, 4000),))
    else:
        getattr(entries[0], end)()
    assert books.loads()[NEAR.incarnation].fetches == (3968,)
    for entry in entries * 2:
        entry.release()
    assert books.loads().get(NEAR.incarnation, NO_LOAD).fetches == ()


def test_a_node_that_others_fetch_from_is_not_forgotten() -> None:
    columns, source = LoadColumns(), Incarnation("s", 1)
    at = columns.put_fetch(source, 64)
    columns.forget_idle(keep=0)
    assert columns[source].fetches == (64,)

    columns.take_fetch(source, at)
    columns.forget_idle(keep=0)
    assert source not in columns
