"""A node that has measured itself far too slow, or too fast, gets its share of requests back. Simulated."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvrelay.bench.placement import DEVICE
from kvrelay.bench.sim_fleet import Events, FleetPlan, FleetSim
from kvrelay.bench.sim_policies import Ours
from kvrelay.bench.trace import Arrival, Trace
from kvrelay.core.clock import ManualClock
from kvrelay.core.time_fit import TimeFit
from kvrelay.core.types import Incarnation, Role
from kvrelay.decode_node import published_cost as of_decode
from kvrelay.index.mirror_state import MirrorState
from kvrelay.prefill_node import published_cost as of_prefill
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.cost import DEFAULT_COST, LEAST_BELIEF, NodeCost, belief, published_cost
from kvrelay.router.fleet import NodeView
from kvrelay.router.learned import Learned
from kvrelay.router.usual import with_usual_costs
from placement_lab import decode, prefill

BACK_AFTER_S = 300.0  # what docs/placement.md promises for a first fit that is ten times too slow
LASTS_S = 600.0
NODES = 4
CHUNK_TOKENS = 8192
PLAN = FleetPlan(prefill_nodes=NODES, decode_nodes=NODES, cost=DEVICE, heartbeat_s=2.0)


class MeasuringFleet(FleetSim):
    """Every node fits its own times and publishes them; `wrong` has begun with a fit of times `factor` too long."""

    def __init__(self, trace: Trace, wrong: Incarnation, factor: float, *, says_age: bool) -> None:
        self._fits: dict[Incarnation, TimeFit] = {}
        self._says_age = says_age
        self._wrong, self._factor = wrong, factor
        super().__init__(PLAN, trace, self._made)

    def _made(self, mirror: MirrorState, events: Events) -> Ours:
        nodes = [Incarnation(f"{role}{at:03}", 1) for role in "pd" for at in range(NODES)]
        for node in nodes:
            is_prefill = node.name.startswith("p")
            fit = self._fits[node] = TimeFit(prefer_start=not is_prefill, clock=events.clock)
            for at in range(16):
                x, y = (1000.0 + at * 100, (1000.0 + at * 100) ** 2 / 2) if is_prefill else (1 + at % 4, at * 1000.0)
                took_s = (
                    x * DEVICE.token_s + y * DEVICE.pair_s
                    if is_prefill
                    else DEVICE.step_s + x * DEVICE.sequence_s + y * DEVICE.context_token_s
                )
                fit.observe(took_s * (self._factor if node == self._wrong else 1.0), x=x, y=y)
        return Ours(mirror, events.clock)

    def _heartbeat(self) -> None:
        super()._heartbeat()
        for node in self._decode.values():  # at each heartbeat some steps of what runs; a node would see hundreds
            for _ in range(8 if node.running else 0):
                self._fits[node.node].observe(node.step_s(), x=len(node.running), y=node.context_tokens)
        self._views = with_usual_costs([self._published(view) for view in self._views])

    def _computed(self, node, job, added, evicted) -> None:  # type: ignore[no-untyped-def]
        tokens, cached = job.prompt_tokens - job.cached_tokens, job.cached_tokens
        self._fits[node.node].observe(job.alone_s, x=tokens, y=tokens * cached + tokens * tokens / 2)
        super()._computed(node, job, added, evicted)

    def _published(self, view: NodeView) -> NodeView:
        fitted, now_s = self._fits[view.incarnation].fitted, self.events.clock()
        assert fitted is not None
        if not self._says_age:
            fitted = replace(fitted, at_s=now_s)
        if view.role is Role.PREFILL:
            cost = of_prefill.cost_of(fitted, ring_size=1, chunk_tokens=CHUNK_TOKENS, now_s=now_s)
            record = fleet_pb2.NodeRecord(role=fleet_pb2.NODE_ROLE_PREFILL, ring_size=1, cost=cost)
        else:
            record = fleet_pb2.NodeRecord(
                role=fleet_pb2.NODE_ROLE_DECODE, cost=of_decode.cost_of(fitted, None, now_s=now_s)
            )
        return replace(view, cost=published_cost(record))


def calm(seed: int) -> Trace:
    """Prompts that share nothing; prefill nodes are idle most of the time, decode nodes have a few sequences each."""
    rng = random.Random(seed)
    times = sorted(rng.uniform(0.0, LASTS_S) for _ in range(1200))
    arrivals = (
        Arrival(at_s, 512 * rng.randrange(4, 16), rng.randrange(500, 2000), (at.to_bytes(16, "big"),))
        for at, at_s in enumerate(times)
    )
    return Trace("calm", 512, tuple(arrivals))


def share_of(fleet: MeasuringFleet, node: Incarnation, *, since_s: float) -> float:
    """Return the share of requests that a node gets from a time on."""
    count: Counter[Incarnation] = Counter()
    chosen = fleet._choose

    def counted(job):  # type: ignore[no-untyped-def]
        pair = chosen(job)
        if job.at_s >= since_s and pair is not None:
            count.update(pair)
        return pair

    fleet._choose = counted  # type: ignore[method-assign]
    fleet.run()
    return 2 * count[node] / count.total()


@pytest.mark.parametrize("name", ["p001", "d001"])
def test_a_node_ten_times_too_slow_by_its_own_word_has_its_share_back_in_time(name: str) -> None:
    node = Incarnation(name, 1)

    def share(factor: float, *, says_age: bool) -> float:
        return share_of(MeasuringFleet(calm(1), node, factor, says_age=says_age), node, since_s=BACK_AFTER_S)

    assert share(10.0, says_age=True) >= 0.8 / NODES
    assert share(10.0, says_age=False) <= 0.5 / NODES


def measured(token_s: float, *, age_s: float = 0.0, observations: int = 16) -> NodeCost:
    return NodeCost(token_s=token_s, step_s=token_s, is_measured=True, age_s=age_s, observations=observations)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_what_a_node_said_fades_towards_the_usual_and_the_less_it_rests_on_the_sooner(factor: float) -> None:
    def off(age_s: float, observations: int = 16) -> float:
        others = [prefill(f"p{at}", cost=measured(1.0)) for at in range(4)]
        wrong = prefill("x", cost=measured(factor, age_s=age_s, observations=observations))
        found = with_usual_costs([*others, wrong])[-1].cost.token_s
        return max(found, 1 / found)

    assert off(0.0) == pytest.approx(10.0)
    assert off(60.0) == pytest.approx(10.0**0.5)
    assert off(BACK_AFTER_S) < 1.1
    assert off(BACK_AFTER_S, observations=100_000) > 4.0  # one that is slow and has said so often is tried seldom
    assert off(3600.0, observations=100_000) < 1.1


def test_nobody_is_forgotten_while_all_idle() -> None:
    nodes = [decode(f"d{at}", cost=measured(float(at + 1), age_s=40_000.0)) for at in range(4)]

    assert [node.cost.step_s for node in with_usual_costs(nodes)] == [1.0, 2.0, 3.0, 4.0]


def test_the_only_node_of_its_kind_fades_too_towards_its_role() -> None:
    others = [decode(f"d{at}", cost=measured(1.0)) for at in range(3)]
    lonely = decode("x", model="other", cost=measured(10.0, age_s=BACK_AFTER_S))

    assert with_usual_costs([*others, lonely])[-1].cost.step_s < 1.1


def test_what_decode_nodes_say_of_their_prompts_fades_by_itself() -> None:
    def node(name: str, token_s: float, local_age_s: float) -> NodeView:
        cost = replace(measured(1.0), token_s=token_s, is_measured_local=True, local_age_s=local_age_s)
        return decode(name, cost=replace(cost, local_observations=16))

    found = with_usual_costs([node("d1", 1.0, 0.0), node("d2", 1.0, 0.0), node("x", 10.0, BACK_AFTER_S)])[-1].cost

    assert found.step_s == 1.0
    assert found.token_s < 1.1


def test_most_nodes_are_wrong_and_the_one_that_serves_is_what_is_usual() -> None:
    wrong = [decode(f"d{at}", cost=measured(10.0, age_s=BACK_AFTER_S)) for at in range(7)]
    found = with_usual_costs([*wrong, decode("x", cost=measured(1.0))])

    assert max(node.cost.step_s for node in found) < 1.1


def test_requests_are_refused_by_what_a_node_said_lately_only() -> None:
    assert measured(1.0).is_believed
    assert not measured(1.0, age_s=61.0).is_believed
    assert belief(60.0, 16) == LEAST_BELIEF
    assert not DEFAULT_COST.is_believed


def test_a_correction_that_nothing_proves_any_more_fades_while_others_are_seen() -> None:
    clock = ManualClock()
    learned, slow, other = Learned(clock), prefill("slow"), prefill("other")
    for name in "abc":
        learned.observe_prefill(Incarnation(name, 1), predicted_s=1.0, observed_s=1.0)
    for _ in range(16):
        learned.observe_prefill(slow.incarnation, predicted_s=1.0, observed_s=10.0)
    clock.advance(BACK_AFTER_S)

    def token_s() -> float:
        return learned.corrected([slow, other, *map(prefill, "abc")])[0].cost.token_s

    assert token_s() > 5 * DEFAULT_COST.token_s  # nobody was seen since
    learned.observe_prefill(other.incarnation, predicted_s=1.0, observed_s=1.0)
    assert token_s() < 1.5 * DEFAULT_COST.token_s


def test_the_first_work_after_a_pause_is_in_the_fit_at_once() -> None:
    clock = ManualClock()
    fit = TimeFit(clock=clock)
    for _ in range(16):
        fit.observe(10.0, x=1000, y=0)
    clock.advance(BACK_AFTER_S)
    fit.observe(1.0, x=1000, y=0)

    assert fit.fitted is not None
    assert fit.fitted.at_s == clock()
    assert fit.fitted.first_s * 1000 < 3.0
