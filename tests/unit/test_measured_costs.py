"""Nodes measure what their work costs; routers place by it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.time_fit import TimeFit
from kvrelay.core.types import Counters, Incarnation, LinkState, Role
from kvrelay.kv_transfer.link_meter import LinkMeter
from kvrelay.kv_transfer.link_records import MOST_LINKS, add_links
from kvrelay.kv_transfer.links import Links
from kvrelay.prefill_node.published_cost import cost_of
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.cost import DEFAULT_COST, compute_s, published_cost, step_s
from kvrelay.router.fleet import NodeView, view_of
from kvrelay.router.learned import Learned
from kvrelay.router.placement import Question, place
from kvrelay.router.usual import UsualLinks

GIB = 1 << 30


def fed(start_s: float, first_s: float, second_s: float, *, noise: float = 0.1, count: int = 300) -> TimeFit:
    """A fit that has seen chunks of a device with these costs."""
    fit, rng = TimeFit(), random.Random(1)
    for _ in range(count):
        tokens, cached = rng.choice((64, 500, 2048)), rng.randrange(0, 100_000, 64)
        pairs = tokens * cached + tokens * tokens / 2
        took_s = (start_s + tokens * first_s + pairs * second_s) * rng.uniform(1 - noise, 1 + noise)
        fit.observe(took_s, x=tokens, y=pairs)
    return fit


def test_costs_are_found_in_noisy_times() -> None:
    fitted = fed(0.004, 2e-5, 4e-10).fitted

    assert fitted is not None
    assert fitted.start_s == pytest.approx(0.004, rel=0.2)
    assert fitted.first_s == pytest.approx(2e-5, rel=0.2)
    assert fitted.second_s == pytest.approx(4e-10, rel=0.2)


def test_no_cost_is_negative_and_nothing_is_said_after_a_few_pieces() -> None:
    fitted = fed(0.0, 1e-4, 0.0, noise=0.3).fitted
    assert fitted is not None
    assert min(fitted.start_s, fitted.first_s, fitted.second_s) >= 0.0
    assert fed(0.0, 1e-4, 0.0, count=10).fitted is None


def test_steps_of_one_sequence_only_are_put_down_to_the_step() -> None:
    fit = TimeFit(prefer_start=True)
    for at in range(100):
        fit.observe(0.004 + at * 1e-6, x=1, y=at)

    assert fit.fitted is not None
    assert fit.fitted.start_s + 10 * fit.fitted.first_s < 0.005


def test_a_device_that_became_slower_is_believed() -> None:
    fit = fed(0.0, 1e-5, 0.0)
    for _ in range(800):
        fit.observe(5e-5 * 1000, x=1000, y=1000 * 500)

    assert fit.fitted is not None
    assert fit.fitted.first_s * 1000 + fit.fitted.second_s * 500_000 == pytest.approx(0.05, rel=0.15)


@pytest.mark.parametrize("ring_size", [1, 4])
def test_a_published_cost_predicts_what_the_node_has_seen(ring_size: int) -> None:
    fitted = fed(0.001, 2e-5, 4e-10, noise=0.02).fitted
    assert fitted is not None
    record = fleet_pb2.NodeRecord(
        role=fleet_pb2.NODE_ROLE_PREFILL,
        ring_size=ring_size,
        cost=cost_of(fitted, ring_size=ring_size, chunk_tokens=2048, now_s=fitted.at_s),
    )
    cost = published_cost(record)
    for tokens, cached in ((2048, 0), (2048, 50_000), (500, 1000)):
        seen_s = 0.001 + tokens * 2e-5 + (tokens * cached + tokens * tokens / 2) * 4e-10
        said_s = compute_s(cost, tokens=tokens, cached=cached, ring_size=ring_size, break_even_tokens=1024)
        assert said_s == pytest.approx(seen_s, rel=0.15)


def test_a_decode_nodes_cost_is_of_steps_and_its_prefill_stays_assumed() -> None:
    cost = published_cost(
        fleet_pb2.NodeRecord(
            role=fleet_pb2.NODE_ROLE_DECODE,
            cost=fleet_pb2.NodeCost(step_s=0.003, sequence_s=1e-5, context_token_s=1e-8),
        )
    )

    assert step_s(cost, sequences=10, context_tokens=100_000) == pytest.approx(0.0041)
    assert cost.token_s == DEFAULT_COST.token_s
    assert published_cost(fleet_pb2.NodeRecord()) is DEFAULT_COST


def test_a_link_is_measured_while_something_is_on_its_way_only() -> None:
    meter = LinkMeter()
    for begin_s in (0.0, 100.0):
        meter.posted(begin_s)
        meter.posted(begin_s + 0.5)
        meter.ended(GIB, begin_s + 1.0)
        meter.ended(GIB, begin_s + 2.0)

    assert meter.bytes_per_s == pytest.approx(GIB)
    meter.posted(200.0)
    meter.ended(0, 300.0)  # failed
    assert meter.bytes_per_s == pytest.approx(GIB)


def told(states: dict[str, LinkState]) -> fleet_pb2.NodeRecord:
    record = fleet_pb2.NodeRecord(ring_size=2)
    add_links(record, states, token_bytes=31_104)
    return record


def test_links_are_of_all_ranks_and_say_what_a_token_takes() -> None:
    (link,) = told({"d@000000000000002a/0": LinkState(1e9, "cma/memory", True)}).links

    assert (link.peer, link.bytes_per_s) == ("d", 2e9)
    assert link.token_s == pytest.approx(31_104 / 2e9)
    assert (link.route, link.is_unexpected) == ("cma/memory", False)


def test_a_link_whose_speed_is_not_known_yet_says_its_route_and_no_time() -> None:
    (link,) = told({"d@000000000000002a/0": LinkState(0.0, "tcp/eth0", False)}).links

    assert (link.route, link.is_unexpected, link.token_s) == ("tcp/eth0", True, 0.0)


def a_view(name: str, role: Role, **changes: object) -> NodeView:
    record = fleet_pb2.NodeRecord(
        role=fleet_pb2.NODE_ROLE_PREFILL if role is Role.PREFILL else fleet_pb2.NODE_ROLE_DECODE,
        ring_size=1, layout_fingerprint=b"f", max_model_len=1 << 20, block_tokens=64, page_tokens=64,
        total_pages=100_000, free_pages=100_000,
    )  # fmt: skip
    view = view_of(record)
    assert view is not None
    return replace(view, incarnation=Incarnation(name, 1), **changes)  # type: ignore[arg-type]


def test_the_pair_with_the_fast_link_is_chosen_and_an_unknown_one_counts_as_usual() -> None:
    near, far = {"d1": 1e-6, "d2": 5e-4}, {"d1": 5e-4, "d2": 1e-6}
    p1, p2 = a_view("p1", Role.PREFILL, links=near), a_view("p2", Role.PREFILL, links=far)
    d1, d2 = a_view("d1", Role.DECODE, active_requests=1), a_view("d2", Role.DECODE)
    nodes = [p1, p2, d1, d2]
    question = Question(
        prompt_tokens=50_000, total_tokens=50_010, needs_decode=True, long_prompt_tokens=1024,
        usual_link_s=2e-4,
    )  # fmt: skip
    pair = place(nodes, question)
    assert pair.decode is not None
    assert (pair.prefill.incarnation.name, pair.decode.incarnation.name) == ("p2", "d2")

    busy = place([p1, replace(p2, queued_tokens=10_000_000), d1, d2], question)
    assert busy.decode is not None
    assert (busy.prefill.incarnation.name, busy.decode.incarnation.name) == ("p1", "d1")


def test_a_record_tells_of_the_latest_links_only_and_what_is_usual_of_the_others() -> None:
    agent = "d{:03}@000000000000002a/0".format
    states = {agent(at): LinkState(1e9 if at < 500 else 1e6, "rc", True, age_s=float(at)) for at in range(1000)}
    states[agent(999)] = LinkState(1e6, "tcp", False, age_s=999.0)
    record = told(states)

    assert [link.peer for link in record.links] == ["d999", *(f"d{at:03}" for at in range(MOST_LINKS - 1))]
    assert record.other_link_token_s == pytest.approx(31_104 / 2e6, rel=0.5)
    assert len(record.SerializeToString()) < 2_500
    assert not told(dict(list(states.items())[:MOST_LINKS])).other_link_token_s


def test_of_two_lives_of_a_peer_the_record_tells_of_the_latest() -> None:
    old, new = LinkState(1e9, "rc", True, age_s=50.0), LinkState(5e8, "tcp", True, age_s=1.0)
    (link,) = told({"d@0000000000000001/0": old, "d@0000000000000002/0": new}).links

    assert link.route == "tcp"


def test_a_link_that_was_left_out_for_long_counts_as_usual_again_and_not_while_all_idle() -> None:
    def record(age_s: float, others_age_s: float) -> fleet_pb2.NodeRecord:
        links = [fleet_pb2.Link(peer=f"d{at}", token_s=1e-6, age_s=others_age_s) for at in range(3)]
        return fleet_pb2.NodeRecord(
            role=fleet_pb2.NODE_ROLE_PREFILL, links=[*links, fleet_pb2.Link(peer="bad", token_s=1e-3, age_s=age_s)]
        )

    def believed_s(one: fleet_pb2.NodeRecord) -> float:
        view = view_of(one, UsualLinks.of([one]))
        assert view is not None
        return view.links["bad"]

    assert believed_s(record(0.0, 0.0)) == 1e-3
    assert believed_s(record(3600.0, 1.0)) == pytest.approx(1e-6, rel=0.05)
    assert believed_s(record(36_000.0, 36_000.0)) == 1e-3
    assert UsualLinks.of([fleet_pb2.NodeRecord()]).token_s == 0.0


def test_a_link_beyond_those_listed_takes_what_the_node_says_of_the_others() -> None:
    near, far = a_view("p1", Role.PREFILL, links={"d1": 1e-6}, other_link_s=5e-4), a_view("d2", Role.DECODE)
    question = Question(
        prompt_tokens=50_000, total_tokens=50_010, needs_decode=True, long_prompt_tokens=1024, usual_link_s=1e-6
    )
    assert question.link_s(near, far) == 5e-4
    assert question.link_s(replace(near, other_link_s=0.0), far) == 1e-6


def test_what_was_learned_of_assumed_costs_is_forgotten_when_a_node_says_its_own() -> None:
    learned, node = Learned(), a_view("p", Role.PREFILL)
    for _ in range(5):
        learned.observe_prefill(node.incarnation, predicted_s=1.0, observed_s=0.1)
    assert learned.corrected([node])[0].cost.token_s < 0.2 * DEFAULT_COST.token_s

    measured = replace(node, cost=replace(DEFAULT_COST, token_s=3e-5, is_measured=True))
    assert learned.corrected([measured])[0].cost.token_s == 3e-5
    assert learned.is_proven(node.incarnation)


def test_a_node_that_takes_another_role_has_yet_to_prove_itself_in_it() -> None:
    learned, node = Learned(), a_view("n", Role.DECODE)
    learned.corrected([replace(node, cost=replace(DEFAULT_COST, is_measured=True))])
    assert learned.is_proven(node.incarnation)

    learned.corrected([replace(node, role=Role.PREFILL)])
    assert not learned.is_proven(node.incarnation)


def test_of_too_many_links_the_one_used_longest_ago_is_forgotten() -> None:
    clock = ManualClock()
    links = Links(Counters(), expected_routes=(), clock=clock)
    for name in ("first", *(f"d{at}" for at in range(1022)), "last"):
        clock.advance(1.0)
        meter = links.to(name)
        meter.route = "rc"
    links.to("first").posted(clock())
    links.to("new").route = "rc"

    assert links.states().keys() >= {"first", "last", "new"}
    assert "d0" not in links.states()
    assert links.states()["d1"].age_s > links.states()["last"].age_s == 0.0
