"""Nodes whose costs cannot be told apart share a load, however light it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.reader import Confidence
from kvrelay.router.books import Books
from kvrelay.router.cost import NodeCost
from kvrelay.router.decisions import explained
from kvrelay.router.fleet import NodeView
from kvrelay.router.placement import Load, place
from kvrelay.router.shortlist import SMALL_FLEET, Roster
from placement_lab import asked, decode, names, prefill

P = prefill("p")


def stepping(name: str, times: float = 1.0, **changes: object) -> NodeView:
    return decode(name, cost=NodeCost(step_s=0.01 * times, sequence_s=0.001 * times), **changes)


def one_after_another(nodes: list[NodeView], num: int, prompt_tokens: int = 500) -> Counter[str]:
    """Return how many of so many requests each node gets when each ends before the next one comes."""
    clock, got = ManualClock(), Counter[str]()
    books = Books(clock)
    for _ in range(num):
        pair = place(nodes, asked(prompt_tokens, total_tokens=prompt_tokens + 300, loads=books.loads()))
        got.update(names(pair))
        books.enter(pair, decode_pages=9, hashes=()).release()
        clock.advance(1.0)
    return got


def test_decode_nodes_within_noise_of_the_best_take_turns_and_a_slower_one_gets_nothing() -> None:
    nodes = [P, stepping("a"), stepping("b", 1.03), stepping("c", 0.99), stepping("slow", 1.08)]

    got = one_after_another(nodes, 30)

    assert (got["a"], got["b"], got["c"], got["slow"]) == (10, 10, 10, 0)


def test_prefill_nodes_share_by_what_they_have_computed_lately() -> None:
    costs = {name: NodeCost(token_s=1e-4 * times) for name, times in (("a", 1.0), ("b", 1.04))}
    nodes = [*(prefill(name, cost=cost) for name, cost in costs.items()), decode("d")]

    got = one_after_another(nodes, 200, prompt_tokens=2000)

    assert min(got["a"], got["b"]) > 90


def test_who_has_fewer_requests_goes_first() -> None:
    a, b = stepping("a", max_batch=64), stepping("b", 1.03, max_batch=64)
    loads = {a.incarnation: Load(31, turn=1), b.incarnation: Load(30, turn=2)}

    assert names(place([P, a, b], asked(loads=loads)))[1] == "b"


@pytest.mark.parametrize(("tokens", "chosen"), [(2048, "home"), (128, "other")])
def test_a_conversation_stays_where_it_is_and_a_few_common_tokens_hold_nobody(tokens: int, chosen: str) -> None:
    home, other = stepping("home", 1.02), stepping("other")
    loads = {home.incarnation: Load(turn=2), other.incarnation: Load(turn=1)}
    question = asked(3000, total_tokens=3300, cached_tokens={home.incarnation: tokens}, loads=loads)

    assert names(place([P, home, other], question))[1] == chosen


def test_a_node_that_would_have_to_evict_and_one_with_a_slow_link_are_not_as_good() -> None:
    a, full, far = stepping("a"), stepping("full", free_pages=0), stepping("far")
    loads = {a.incarnation: Load(turn=9)}
    question = asked(2000, total_tokens=2300, loads=loads, usual_link_s=5e-6)

    pair = place([replace(P, links={"far": 1e-4}), a, full, far], question)

    assert names(pair)[1] == "a"
    assert names(place([P, a, full, far], question))[1] == "far"


def test_noise_is_that_of_the_link_that_was_measured() -> None:
    """A million tokens take 5 s on a link that nothing is known of, and 0.1 s on this one."""
    big = {"max_model_len": 2_000_000, "total_pages": 20_000, "free_pages": 20_000}
    nodes = [prefill("p", **big), stepping("best", **big), stepping("slow", 1.08, **big)]
    loads = {nodes[1].incarnation: Load(turn=1)}
    question = asked(1_000_000, total_tokens=1_000_300, loads=loads, usual_link_s=1e-7)

    assert names(place(nodes, question))[1] == "best"


def test_a_request_is_judged_by_the_best_of_near_equals_since_a_refused_one_takes_no_turn() -> None:
    best, next_one = stepping("best"), stepping("next", 1.04)
    loads = {best.incarnation: Load(turn=1)}

    pair = place([P, best, next_one], asked(total_tokens=400, loads=loads))

    assert names(pair)[1] == "next"
    assert pair.step_s() == place([P, best], asked(total_tokens=400)).step_s()


def test_the_log_says_that_and_why_it_was_shared() -> None:
    a, b, slow = stepping("a"), stepping("b", 1.03), stepping("slow", 2.0)
    loads = {a.incarnation: Load(turn=2), b.incarnation: Load(turn=1)}

    def verdicts(question_loads: dict[Incarnation, Load]) -> dict[str, str]:
        pair = place([P, a, b, slow], asked(loads=question_loads, total_tokens=400))
        said = explained(pair, prompt_tokens=100, confidence=Confidence.EXACT, cached={})
        return {one.name: one.verdict for one in said.candidates if one.role is Role.DECODE}

    said = verdicts(loads)
    assert said["b"] == "chosen: within noise of the best, shared: its latest request is longer ago"
    assert said["a"].startswith("costs 0.0845 s less than the chosen one: within noise of the best, its turn")
    assert said["slow"].startswith("costs 2.73 s more than the chosen one")
    assert "noise" not in said["slow"]

    said = verdicts({a.incarnation: Load(1, turn=1), slow.incarnation: Load()})
    assert said["b"] == "chosen"  # another sequence on `a` is more than noise
    assert (
        verdicts({})["a"] == "chosen: within noise of the best, shared: nobody has fewer requests, or none for longer"
    )


def test_in_a_large_fleet_all_near_equals_share_and_not_only_the_few_that_are_looked_at() -> None:
    nodes = [P, *(stepping(f"d{at:02}", 1.0 + at % 5 / 100) for at in range(SMALL_FLEET))]
    books, got, roster = Books(ManualClock()), Counter[str](), Roster(nodes)
    for _ in range(2 * SMALL_FLEET):
        loads = books.loads()
        pair = roster.place(asked(500, total_tokens=800, loads=loads), [loads])
        assert any(one.node is pair.decode for one in pair.scores)
        got[names(pair)[1]] += 1
        books.enter(pair, decode_pages=9, hashes=()).release()

    assert set(got.values()) == {2}
    assert len(got) == SMALL_FLEET
