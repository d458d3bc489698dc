"""How a prompt gets to its decode node: handed over, completed there, or partly fetched from another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.index.reader import Confidence
from kvrelay.router.books import Books, Share
from kvrelay.router.cost import NodeCost
from kvrelay.router.decisions import explained
from kvrelay.router.fleet import NodeView
from kvrelay.router.placement import Load, Pair, Question, place
from placement_lab import HASHES, PAGE, asked, decode, names, prefill

P, D = prefill("p"), decode("d")

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


def test_a_decode_node_counts_as_having_a_prompt_once_it_is_computed_and_until_the_request_ends() -> None:
    books = Books()
    entry = books.enter(Pair(P, D, 100, {}), decode_pages=3, hashes=HASHES)
    assert dict(books.tentative_blocks(HASHES)) == {P.incarnation: 10}

    entry.computed()
    assert dict(books.tentative_blocks(HASHES)) == {P.incarnation: 10, D.incarnation: 10}
    entry.release()
    assert books.tentative_blocks(HASHES) == []


@pytest.mark.parametrize("is_computed", [False, True])
def test_the_books_follow_to_where_the_work_is_done(is_computed: bool) -> None:
    books, ended = Books(), []
    pair = place([P, CHAT], after_a_turn())
    entry = books.enter(pair, decode_pages=32, hashes=HASHES, on_computed=lambda: ended.append(1))
    if is_computed:  # too late: nothing is to be done any more
        entry.computed()
    books.replan(entry, (Share(P.incarnation, 500, work_s=2.0), Share(CHAT.incarnation, pages=32)))

    assert (P.incarnation in books.loads()) is not is_computed
    assert not entry.is_alone or is_computed
    if not is_computed:
        assert books.loads()[P.incarnation] == Load(1, 500, 0)
        assert books.loads()[CHAT.incarnation] == Load(1, 0, 32)
        assert dict(books.tentative_blocks(HASHES)) == {P.incarnation: 10}
    entry.release()
    assert (books.accounts, ended, books.num_waiting) == ({}, [1], 0)
    assert books.tentative_blocks(HASHES) == []


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
    assert "fetch_s" not in next(one.parts for one in pair.scores if one.node is pair.prefill)


def test_the_source_with_the_most_to_save_is_pulled_from() -> None:
    far = decode("far", links={"pulls": 5e-5})
    question = asked(4000, cached_tokens={HOLDER.incarnation: 3968, far.incarnation: 3968, D.incarnation: 512})

    pair = place([PULLS, D, far, HOLDER], question)

    assert pair.pull is not None
    assert pair.pull.source == HOLDER


def test_a_source_that_failed_this_request_is_not_asked_again() -> None:
    other = decode("other", links={"pulls": 5e-5})
    cached = {HOLDER.incarnation: 3968, other.incarnation: 3968}

    pair = place([PULLS, D, HOLDER, other], asked(4000, cached_tokens=cached, avoid=frozenset({HOLDER.incarnation})))

    assert pair.pull is not None
    assert pair.pull.source == other


def test_prefill_nodes_are_sources_too_whatever_their_ring_and_a_busy_one_takes_its_time() -> None:
    ring = prefill("ring", ring_size=4, chunk_tokens=8192)
    question = asked(4000, cached_tokens={ring.incarnation: 3968}, avoid=frozenset())
    away = replace(ring, draining=True)  # places nothing more there, and its blocks are still good

    pair = place([PULLS, away, D], question)

    assert pair.pull is not None
    assert (pair.pull.source, pair.pull.upto) == (away, 3968)
    assert pair.pull.transfer_s == pytest.approx(0.01 + 3968 * NodeCost().relay_token_s)

    busy = replace(away, queued_tokens=50_000)  # a step and a half takes 0.3 s, and computing it 0.4 s
    slow = place([PULLS, busy, D], question).pull
    assert slow is not None
    assert slow.transfer_s == pytest.approx(pair.pull.transfer_s + 1.5 * 8192 * NodeCost().token_s / 4)

    very_busy = replace(busy, chunk_tokens=32_768)
    late = place([PULLS, very_busy, D], question)
    assert late.pull is None
    assert "fetching 3968 tokens from ring would take 1.26 s, computing them 0.397 s" in late.way


def test_what_is_only_on_its_way_to_a_node_is_not_fetched_from_it() -> None:
    tentative = prefill("tentative", draining=True)
    question = asked(4000, cached_tokens={tentative.incarnation: 3968, HOLDER.incarnation: 1024})

    pair = place([PULLS, tentative, D, HOLDER], replace(question, held_tokens={HOLDER.incarnation: 1024}))

    assert pair.pull is not None
    assert pair.pull.source == HOLDER


def test_a_request_that_counts_on_what_is_on_its_way_says_where_it_could_be_had() -> None:
    """It may come before the request that was to fetch it."""
    cached = {PULLS.incarnation: 3968, HOLDER.incarnation: 3968}
    question = asked(4000, cached_tokens=cached, held_tokens={HOLDER.incarnation: 3968})

    pair = place([PULLS, D, HOLDER], question)

    assert (pair.pull, pair.remaining_tokens) == (None, 32)
    assert pair.late_pull is not None
    assert (pair.late_pull.source, pair.late_pull.upto) == (HOLDER, 3968)
    assert place([PULLS, D, HOLDER], replace(question, held_tokens=cached)).late_pull is None
    assert place([P, D, HOLDER], replace(question, cached_tokens={P.incarnation: 3968, **cached})).late_pull is None


def test_a_late_fetch_is_named_too_when_what_others_have_behind_it_is_sooner_computed() -> None:
    """The holder has 64 tokens more than what is on its way: too few for a fetch of their own."""
    question = asked(
        4100,
        cached_tokens={PULLS.incarnation: 3968, HOLDER.incarnation: 4032},
        held_tokens={HOLDER.incarnation: 4032},
    )

    pair = place([PULLS, D, HOLDER], question)

    assert (pair.pull, pair.remaining_tokens) == (None, 132)
    assert "fetching 64 tokens from holder would take" in pair.way
    assert pair.late_pull is not None
    assert (pair.late_pull.source, pair.late_pull.upto, pair.late_pull.tokens) == (HOLDER, 3968, 3968)


def test_prefill_nodes_are_compared_by_what_they_would_fetch() -> None:
    """The one that has the prompt is busy for a second; of the two idle ones the better link to it decides."""
    busy = prefill("busy", queued_tokens=10_000, chunk_tokens=512, links={"near": 1e-6, "far": 8e-5})
    near, far = prefill("near", pulls=True), prefill("far", pulls=True)
    mute = prefill("a-mute")  # the first by name, and does not fetch

    pair = place([mute, busy, far, near, D], asked(8000, cached_tokens={busy.incarnation: 7936}))

    assert pair.prefill == near
    assert pair.pull is not None
    assert pair.pull.source == busy
    decision = explained(pair, prompt_tokens=8000, confidence=Confidence.EXACT, cached={"busy": 7936})
    parts = {one.name: one.parts for one in decision.candidates}
    assert parts["near"]["fetch_s"] == pytest.approx(0.01 + 1.5 * 512 * 1e-4 + 7936e-6)
    assert parts["far"]["fetch_s"] > 0.6
    assert "fetch_s" not in parts["a-mute"]
    assert all(one.total_s == pytest.approx(sum(one.parts.values())) for one in decision.candidates)
    assert decision.way.endswith(f"pull from busy 7936 tokens in {pair.pull.transfer_s:.3g} s, computing them 0.794 s")


def test_a_prompt_without_an_answer_is_fetched_too() -> None:
    pair = place([PULLS, HOLDER], asked(4000, cached_tokens={HOLDER.incarnation: 3968}, needs_decode=False))

    assert (pair.decode, pair.remaining_tokens) == (None, 32)
    assert pair.pull is not None


# -- what a prefill node has in host memory


def in_host(token_s: float = 1e-6, **changes: Any) -> tuple[NodeView, Question]:
    node = prefill("warm", host_token_s=token_s)
    return node, asked(4000, cached_tokens={node.incarnation: 640}, host_tokens={node.incarnation: 3968}, **changes)


def test_blocks_in_host_memory_cost_the_seconds_to_load_them() -> None:
    node, question = in_host()

    pair = place([P, node, D], question)

    assert (names(pair), pair.remaining_tokens, pair.pull) == (("warm", "d"), 4000 - 3968, None)
    assert "warm loads 3328 tokens from host memory in 0.00533 s, computing them" in pair.way
    score = next(one for one in pair.scores if one.node is node)
    assert score.parts["host_s"] == pytest.approx(0.002 + 3328e-6)
    assert score.parts["compute_s"] == pytest.approx(32 * NodeCost().token_s)
    assert pair.work_s == pytest.approx(score.parts["host_s"] + score.parts["compute_s"])


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    node, question = in_host(token_s=1e-3)

    pair = place([node, D], question)

    assert pair.remaining_tokens == 4000 - 640
    assert "loading 3328 tokens from host memory would take 3.33 s, computing them" in pair.way


def test_another_nodes_pool_is_better_than_slow_host_memory() -> None:
    node, question = in_host(token_s=9e-5)
    near = replace(node, pulls=True)
    question = replace(question, cached_tokens={HOLDER.incarnation: 3968})

    pair = place([near, D, HOLDER], question)

    assert pair.pull is not None
    assert pair.pull.source == HOLDER
