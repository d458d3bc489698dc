"""Where requests go, and why not elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.errors import InvalidRequestError, UnavailableError
from kvrelay.core.types import Incarnation, Role
from kvrelay.router.books import Books
from kvrelay.router.cost import NodeCost
from kvrelay.router.placement import Load, Pair, longest_served, missing_for_service, place
from placement_lab import HASHES, PAGE, asked, decode, names, node, prefill

P, D = prefill("p"), decode("d")
SMALL, LARGE = prefill("small", ring_size=1), prefill("large", ring_size=4)


@pytest.mark.parametrize(
    ("prompt_tokens", "chosen"), [(1, "small"), (1023, "small"), (1024, "large"), (30_000, "large")]
)
def test_long_prompts_take_the_largest_ring_and_short_ones_the_smallest(prompt_tokens: int, chosen: str) -> None:
    assert names(place([LARGE, SMALL, D], asked(prompt_tokens))) == (chosen, "d")


def test_what_counts_is_what_remains_behind_the_cached_prefix() -> None:
    cached = asked(30_000, cached_tokens={SMALL.incarnation: 29_952})

    pair = place([LARGE, SMALL, D], cached)

    assert names(pair) == ("small", "d")
    assert pair.remaining_tokens == 48


def test_a_prefix_that_is_cached_whole_still_computes_its_last_page() -> None:
    question = asked(640, cached_tokens={P.incarnation: 640})

    assert place([P, D], question).remaining_tokens == PAGE


def test_work_spills_from_an_overloaded_node_even_with_the_longest_prefix() -> None:
    busy = prefill("busy", queued_tokens=50_000)
    question = asked(1000, cached_tokens={busy.incarnation: 960})

    assert names(place([busy, prefill("free"), D], question))[0] == "free"
    assert names(place([replace(busy, queued_tokens=100), prefill("free"), D], question))[0] == "busy"


def test_what_we_placed_counts_before_any_heartbeat_tells() -> None:
    question = asked(100, loads={Incarnation("a", 1): Load(1, 5000, 0)})

    assert names(place([prefill("a"), prefill("b"), D], question))[0] == "b"


def test_decode_needs_free_pages_then_few_sequences() -> None:
    full, busy, idle = (
        decode("full", free_pages=0),
        decode("busy", active_requests=9),
        decode("idle", active_requests=1),
    )

    assert names(place([P, full, busy, idle], asked()))[1] == "idle"
    assert names(place([P, full, busy], asked()))[1] == "busy"
    assert names(place([P, full], asked()))[1] == "full"  # it may evict; Reserve knows


def test_a_resident_prefix_draws_a_request_to_its_decode_node() -> None:
    near = decode("near", active_requests=3)
    question = asked(32_000, cached_tokens={near.incarnation: 31_936})

    assert names(place([P, near, decode("far")], question))[1] == "near"
    assert names(place([P, replace(near, active_requests=20), decode("far")], question))[1] == "far"


def test_only_nodes_of_one_layout_are_placed_together() -> None:
    nodes = [
        prefill("p1"),
        decode("d2", layout_fingerprint=b"g"),
        prefill("p2", layout_fingerprint=b"g", queued_tokens=99_999),
    ]

    assert names(place(nodes, asked())) == ("p2", "d2")
    with pytest.raises(UnavailableError, match="layout"):
        place([nodes[0], nodes[1]], asked())
    assert missing_for_service(nodes[:2]) == "no prefill and decode node have the same page layout"


def test_a_request_that_ends_at_prefill_needs_no_decode_node() -> None:
    assert names(place([P, decode("d", total_pages=0)], asked(needs_decode=False))) == ("p", "")


def test_every_node_left_out_has_a_reason() -> None:
    nodes = [P, D, prefill("leaving", draining=True), prefill("failed"), decode("tiny", total_pages=1)]
    question = asked(avoid=frozenset({Incarnation("failed", 1)}))

    refused = place(nodes, question).refused

    assert refused == {
        "leaving": "is draining",
        "failed": "failed this request before",
        "tiny": "has 1 pages, the request needs 2",
    }


def test_with_none_left_the_error_names_each_and_why() -> None:
    with pytest.raises(UnavailableError, match="p failed this request before"):
        place([P, D], asked(avoid=frozenset({P.incarnation})))
    with pytest.raises(UnavailableError, match="no decode node"):
        place([P], asked())
    with pytest.raises(UnavailableError, match="no prefill and no decode node"):
        place([], asked())


def test_a_request_larger_than_any_node_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"needs 782 pages .* decode node has 10"):
        place([P, decode("d", total_pages=10)], asked(50_000))


def test_the_longest_request_is_what_both_nodes_of_a_pair_take() -> None:
    assert longest_served([prefill("p", max_model_len=500), decode("d", max_model_len=300)]) == 300
    assert longest_served([prefill("p", max_model_len=500)]) == 0


some_node = st.tuples(
    st.sampled_from(list(Role)), st.integers(1, 4), st.integers(0, 9000), st.integers(0, 2000), st.booleans()
)


@given(st.lists(some_node, min_size=2, max_size=8), st.integers(1, 9000))
def test_a_pair_is_always_usable_and_independent_of_the_order(
    described: list[tuple[Role, int, int, int, bool]], prompt_tokens: int
) -> None:
    nodes = [
        node(f"n{at}", role, ring_size=ring, queued_tokens=queued, free_pages=free, draining=draining)
        for at, (role, ring, queued, free, draining) in enumerate(described)
    ]
    try:
        pair = place(nodes, asked(prompt_tokens))
    except UnavailableError:
        assert {one.role for one in nodes if not one.draining} != set(Role)
        return

    assert place(nodes[::-1], asked(prompt_tokens)) == pair or names(place(nodes[::-1], asked(prompt_tokens))) == names(
        pair
    )
    assert pair.decode is not None
    assert (pair.prefill.role, pair.decode.role) == (Role.PREFILL, Role.DECODE)
    assert not pair.prefill.draining
    assert not pair.decode.draining


# -- more sequences than a decode step takes


def test_a_node_whose_step_is_full_loses_to_one_with_room_that_is_as_fast() -> None:
    as_fast = NodeCost(step_s=0.1, sequence_s=0.0)
    full = decode("a", max_batch=4, active_requests=4, cost=as_fast)
    room = decode("b", max_batch=4, active_requests=3, cost=as_fast)

    assert names(place([P, full, room], asked())) == ("p", "b")
    roomy = replace(full, max_batch=64, active_requests=2)
    assert names(place([P, roomy, room], asked())) == ("p", "a")  # equals: by requests
    assert place([P, room], asked()).step_s() == pytest.approx(0.1)
    assert place([P, replace(full, active_requests=9)], asked()).step_s() == pytest.approx(0.25)  # ten take turns of 4


# -- books


def test_a_burst_with_a_new_shared_prefix_lands_together_until_work_spills() -> None:
    books, landed = Books(), []
    nodes = [prefill("a"), prefill("b"), D]
    for _ in range(64):
        blocks = dict(books.tentative_blocks(HASHES))
        question = asked(700, cached_tokens={one: PAGE * count for one, count in blocks.items()}, loads=books.loads())
        pair = place(nodes, question)
        books.enter(pair, decode_pages=12, hashes=HASHES)
        landed.append(pair.prefill.incarnation.name)

    assert landed[:8] == ["a"] * 8  # the prefix is computed once
    assert landed.count("b") >= 20  # and nobody gets more than its share of the work
    assert dict(books.tentative_blocks([*HASHES[:3], b"x" * 16]))[Incarnation("a", 1)] == 3


def test_books_are_empty_when_all_requests_have_ended() -> None:
    books = Books()
    entries = [books.enter(Pair(P, D, 50, {}), decode_pages=3, hashes=HASHES) for _ in range(3)]
    assert books.loads() == {P.incarnation: Load(3, 150, 0), D.incarnation: Load(3, 0, 9)}

    entries[0].computed()
    entries[0].computed()
    assert books.loads()[P.incarnation].tokens == 100
    for entry in entries * 2:
        entry.release()

    assert books.accounts == {}
