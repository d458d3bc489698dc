"""Where requests go, and why not elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.errors import InvalidRequestError, UnavailableError
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.reader import Confidence
from kvrelay.router.books import Books
from kvrelay.router.cost import NodeCost
from kvrelay.router.decisions import explained
from kvrelay.router.fleet import NodeView
from kvrelay.router.placement import Load, Pair, Question, longest_served, missing_for_service, place

PAGE = 64
HASHES = [bytes([at]) * 16 for at in range(10)]


def node(name: str, role: Role, **changes: Any) -> NodeView:
    plain = NodeView(
        incarnation=Incarnation(name, 1), role=role, endpoint="", ring_size=1, layout_fingerprint=b"f", model="m",
        dtype="float32", max_model_len=100_000, block_tokens=PAGE, page_tokens=PAGE, total_pages=2000,
        free_pages=2000, active_requests=0, queued_tokens=0, draining=False,
    )  # fmt: skip
    return replace(plain, **changes)


def prefill(name: str, **changes: Any) -> NodeView:
    return node(name, Role.PREFILL, **changes)


def decode(name: str, **changes: Any) -> NodeView:
    return node(name, Role.DECODE, **changes)


def asked(prompt_tokens: int = 100, **changes: Any) -> Question:
    given_values = {"total_tokens": prompt_tokens + 20, "needs_decode": True, "long_prompt_tokens": 1024, **changes}
    return Question(prompt_tokens=prompt_tokens, **given_values)


def names(pair: Pair) -> tuple[str, str]:
    return pair.prefill.incarnation.name, pair.decode.incarnation.name if pair.decode else ""


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
    assert names(place([P, replace(full, max_batch=64), room], asked())) == ("p", "a")  # equals: by name
    assert place([P, room], asked()).step_s() == pytest.approx(0.1)
    assert place([P, replace(full, active_requests=9)], asked()).step_s() == pytest.approx(0.25)  # ten take turns of 4


# -- what a decode node computes itself

CHAT = decode("chat", local_tokens=256)


def after_a_turn(prompt_tokens: int = 2000, **changes: Any) -> Question:
    """The decode node has all whole blocks of the conversation but the last few tokens; prefill nodes nothing."""
    return asked(prompt_tokens, cached_tokens={CHAT.incarnation: 1920}, **changes)


def test_a_short_turn_is_completed_by_the_decode_node_that_has_the_conversation() -> None:
    pair = place([P, D, CHAT], after_a_turn())

    assert (names(pair), pair.remaining_tokens) == (("p", "chat"), 80)
    assert pair.local is not None
    assert pair.way.startswith("chat computes the last 80 tokens itself: ")
    explained_pair = explained(pair, prompt_tokens=2000, confidence=Confidence.EXACT, cached={"chat": 1920})
    verdicts = {one.name: one.verdict for one in explained_pair.candidates}
    assert verdicts["chat"] == "chosen: computes what it lacks itself"
    assert verdicts["p"].startswith("not needed")


@pytest.mark.parametrize(
    ("nodes", "question", "why"),
    [
        ([P, D, CHAT], after_a_turn(2200), "no decode node has nearly all"),  # 280 tokens, 256 may be
        ([P, D, CHAT], asked(100), "no decode node has nearly all"),  # nothing of it is anywhere
        ([P, decode("chat")], after_a_turn(), "no decode node has nearly all"),  # it computes nothing itself
        ([P, replace(CHAT, active_requests=60)], after_a_turn(), "chat could compute 80 tokens itself in"),
        ([P, D, replace(CHAT, free_pages=0)], after_a_turn(), "chat could compute 80 tokens itself in"),
    ],
)
def test_it_is_handed_over_when_that_costs_less_in_all(nodes: list[NodeView], question: Question, why: str) -> None:
    pair = place(nodes, question)

    assert pair.local is None
    assert why in pair.way


def test_a_decode_nodes_own_speed_counts_once_it_has_measured_it() -> None:
    slow = replace(CHAT, cost=NodeCost(token_s=1.0, is_measured=True, is_measured_local=True))

    assert place([P, slow], after_a_turn()).local is None


def test_a_prompt_that_is_resident_whole_still_computes_its_last_block() -> None:
    pair = place([P, CHAT], asked(640, cached_tokens={CHAT.incarnation: 640}))

    assert (pair.local is not None, pair.remaining_tokens) == (True, PAGE)


def test_what_a_decode_node_computes_itself_is_no_load_of_the_prefill_node_and_no_hit_there() -> None:
    books = Books()
    pair = place([P, CHAT], after_a_turn())
    entry = books.enter(pair, decode_pages=32, hashes=HASHES)

    assert books.loads()[CHAT.incarnation] == Load(1, 80, 32)
    assert P.incarnation not in books.loads()
    assert P.incarnation not in dict(books.tentative_blocks(HASHES))
    entry.release()
    assert books.accounts == {}


# -- what a prefill node fetches

PULLS = prefill("pulls", pulls=True)
HOLDER = decode("holder")


def test_a_prefix_that_only_a_decode_node_has_is_pulled_when_that_is_faster_than_computing_it() -> None:
    question = asked(4000, cached_tokens={PULLS.incarnation: 1024, HOLDER.incarnation: 3968})

    pair = place([PULLS, D, HOLDER], question)

    assert pair.pull is not None
    assert (pair.pull.source, pair.pull.upto, pair.pull.tokens) == (HOLDER, 3968, 2944)
    assert pair.remaining_tokens == 32
    assert pair.work_s < 0.1 < 2976 * NodeCost().token_s
    assert "pull from holder 2944 tokens" in pair.way


@pytest.mark.parametrize(
    ("nodes", "held"),
    [
        ([P, HOLDER], 3968),  # a ring of several ranks, or one told not to
        ([PULLS, HOLDER], 1024),  # it has no more than the prefill node
        ([PULLS, HOLDER], 1088),  # 64 tokens more: computed before the calls are over
        ([PULLS, replace(HOLDER, links={"pulls": 1e-3})], 3968),  # a slow link
        ([PULLS, replace(HOLDER, layout_fingerprint=b"other"), D], 3968),
    ],
)
def test_otherwise_it_is_computed(nodes: list[NodeView], held: int) -> None:
    pair = place(nodes, asked(4000, cached_tokens={PULLS.incarnation: 1024, HOLDER.incarnation: held}))

    assert pair.pull is None
    assert "pull" not in pair.way


def test_the_source_with_the_most_to_save_is_pulled_from() -> None:
    far = decode("far", links={"pulls": 5e-5})
    question = asked(4000, cached_tokens={HOLDER.incarnation: 3968, far.incarnation: 3968, D.incarnation: 512})

    pair = place([PULLS, D, far, HOLDER], question)

    assert pair.pull is not None
    assert pair.pull.source == HOLDER


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
