"""More requests than a fleet can serve in time: who is let in, and that those are served in time. Simulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvrelay.bench.goodput import admitting, at_rate, cut, is_in_time
from kvrelay.bench.placement import DEVICE
from kvrelay.bench.sim_fleet import FleetPlan, FleetSim
from kvrelay.bench.trace import Arrival, Trace
from kvrelay.core.types import Incarnation
from kvrelay.router import admission
from kvrelay.router.books import Books
from kvrelay.router.cost import NodeCost
from kvrelay.router.placement import Load, place
from kvrelay.router.score import EXPECTED_OUTPUT_TOKENS, OVERTAKING, decode_score
from placement_lab import HASHES, asked, decode, prefill
from public_traces import public_trace

GAP_S = 0.05
STEPS = NodeCost(step_s=0.0, sequence_s=0.0, context_token_s=1e-6, is_measured=True)


def goodput(plan: FleetPlan, trace: Trace, rate: float) -> tuple[float, float]:
    """Return (requests in time per second, share of those let in that were late)."""
    timed = at_rate(trace, plan.prefill_nodes + plan.decode_nodes, rate)
    jobs = FleetSim(plan, timed, admitting(GAP_S)).run().jobs
    in_time = sum(map(is_in_time, jobs))
    served = sum(job.finished_s is not None for job in jobs)
    return in_time / timed.arrivals[-1].at_s, 1 - in_time / max(1, served)


def short_prompts(num_requests: int) -> Trace:
    """Prompts that share nothing and answers that keep one decode node busier than one prefill node."""
    rng = random.Random(4)
    arrivals = (
        Arrival(float(at), 512 * rng.randrange(4, 12), rng.randrange(600, 1000), (at.to_bytes(16, "big"),))
        for at in range(num_requests)
    )
    return Trace("short", 512, tuple(arrivals))


def test_a_step_is_as_long_as_the_context_of_all_sequences_in_it() -> None:
    node = decode("d", cost=STEPS)
    question = asked(1000, total_tokens=1100, loads={node.incarnation: Load(3, context=40_000)})

    assert decode_score(node, question).step_s == pytest.approx(0.041_1)
    told = decode_score(replace(node, active_requests=5), question)  # two more than we placed: like this one
    assert told.step_s == pytest.approx(0.043_3)
    turns = decode_score(replace(node, max_batch=2), question)  # four sequences in turns of two read as much in all
    assert turns.step_s == pytest.approx(0.041_1)


def test_the_books_have_the_context_of_a_request_until_it_ends() -> None:
    books, d = Books(), decode("d")
    pair = place([prefill("p"), d], asked(1000, total_tokens=9000))
    entry = books.enter(pair, decode_pages=3, hashes=HASHES, context=1000 + EXPECTED_OUTPUT_TOKENS)
    entry.computed()

    assert books.loads()[d.incarnation].context == 1256
    entry.release()
    assert books.loads()[d.incarnation].context == 0


@pytest.mark.parametrize(("tokens", "wait_s"), [(10_000, OVERTAKING * 1.0), (100_000, 30.0), (1_000_000, 30.0)])
def test_what_nodes_compute_later_is_not_ahead_of_a_request(tokens: int, wait_s: float) -> None:
    node = prefill("p", max_model_len=1 << 21, total_pages=1 << 20, free_pages=1 << 20)
    question = asked(tokens, needs_decode=False, loads={Incarnation("p", 1): Load(1, 300_000, 0, (30.0,))})

    assert place([node], question).backlog_s() == pytest.approx(wait_s)


def test_o1_at_half_more_than_decode_holds_requests_are_refused_and_not_served_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = FleetPlan(prefill_nodes=1, decode_nodes=1, cost=DEVICE, tbt_target_s=GAP_S)
    trace = short_prompts(1500)
    served, _ = goodput(plan, trace, 0.08)
    overloaded, late = goodput(plan, trace, 0.14)

    assert overloaded >= served
    assert late <= 0.02
    monkeypatch.setattr(admission, "ROOM_TO_GROW", 1.0)
    assert goodput(plan, trace, 0.14)[1] > 0.2  # filled to the brim, every answer grows beyond what was promised


@pytest.mark.parametrize(
    ("name", "num_requests", "scale", "rates"),
    [
        ("mooncake_conversation", 600, 1.0, (0.8, 1.0)),
        ("mooncake_conversation", 300, 0.25, (0.45, 0.6)),
        pytest.param("agentic_code_weka", 1579, 1.0, (1.0, 3.0), marks=pytest.mark.full),
    ],
)
def test_o1_goodput_of_public_traces_stays_at_three_times_the_load(
    name: str, num_requests: int, scale: float, rates: tuple[float, ...]
) -> None:
    whole = public_trace(name)
    trace = cut(replace(whole, arrivals=whole.arrivals[: int(num_requests / scale)]), scale)
    prefill_nodes, decode_nodes = (3, 1) if scale == 1.0 else (1, 3)
    plan = FleetPlan(prefill_nodes=prefill_nodes, decode_nodes=decode_nodes, cost=DEVICE, tbt_target_s=GAP_S)
    peak = max(goodput(plan, trace, rate)[0] for rate in rates)
    overloaded, late = goodput(plan, trace, 3 * rates[-1])

    assert overloaded >= 0.9 * peak
    assert late <= 0.1
