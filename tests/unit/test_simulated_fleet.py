"""The real placement and admission over simulated nodes, on small seeded workloads."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.bench.bounds import evenness_bounds, works_s
from kvrelay.bench.goodput import admitting, at_rate, is_in_time
from kvrelay.bench.placement import DEVICE, replay, slowed, summary
from kvrelay.bench.sim_fleet import FleetPlan, FleetSim
from kvrelay.bench.sim_mixed import MixedSim
from kvrelay.bench.sim_nodes import BlockCache
from kvrelay.bench.trace import Arrival, Trace, copied, read
from kvrelay.core.errors import InvalidRequestError
from public_traces import public_trace

BLOCK = 512
PLAN = FleetPlan(prefill_nodes=4, decode_nodes=2, node_tokens=400_000, cost=slowed(DEVICE, 6.0))


def a_block(*path: int) -> bytes:
    return b"".join(one.to_bytes(2, "big") for one in path).ljust(16, b"\xff")


def a_trace(num_requests: int = 600, *, seed: int = 1, every_s: float = 0.3) -> Trace:
    """Chats of some turns: each prompt is the one before it and more."""
    rng, arrivals, lengths = random.Random(seed), [], dict[int, int]()
    for at in range(num_requests):
        chat = rng.randrange(at // 4 + 1)
        lengths[chat] = lengths.get(chat, 4) + rng.randrange(1, 6)
        blocks = tuple(a_block(chat, depth) for depth in range(lengths[chat]))
        arrivals.append(Arrival(at * every_s, lengths[chat] * BLOCK, rng.randrange(1, 300), blocks))
    return Trace("chats", BLOCK, tuple(arrivals))


def unrelated(num_requests: int) -> Trace:
    """Prompts that share nothing, so that capacity does not depend on who was let in before."""
    rng = random.Random(3)
    arrivals = (
        Arrival(float(at), BLOCK * rng.randrange(4, 40), rng.randrange(1, 300), (a_block(at, 1), a_block(at, 2)))
        for at in range(num_requests)
    )
    return Trace("unrelated", BLOCK, tuple(arrivals))


def test_a_cache_evicts_the_least_used_block_and_never_one_that_another_follows() -> None:
    cache = BlockCache(4)
    cache.use([a_block(1), a_block(2), a_block(3)])
    added, evicted = cache.use([a_block(1), a_block(9), a_block(8)])

    assert (added, evicted) == ([a_block(9), a_block(8)], [a_block(3)])
    assert cache.match([a_block(1), a_block(2), a_block(3)]) == 2


def test_ours_hits_more_than_each_other_policy_that_spreads_the_work() -> None:
    trace = a_trace()
    found = {name: summary(replay(PLAN, trace, name), trace) for name in ("ours", "random", "least-loaded")}

    assert found["ours"]["hit_over_ceiling"] >= 0.9
    assert found["ours"]["max_over_mean_work"] <= 1.1
    assert found["ours"]["hit_rate"] > 1.2 * max(found["random"]["hit_rate"], found["least-loaded"]["hit_rate"])


def test_bounds_of_evenness_are_those_of_requests_that_can_be_counted_by_hand() -> None:
    assert evenness_bounds([1.0] * 8, 2) == {"least": 1.0, "knowing_all": 1.0, "even_until_then": 1.125}
    # Two nodes, eight seconds: the last request is six of them. Two before it, one on each node if they are even.
    assert evenness_bounds([1.0, 1.0, 6.0], 2) == {"least": 1.5, "knowing_all": 1.5, "even_until_then": 1.75}
    assert evenness_bounds([6.0, 1.0, 1.0], 2)["even_until_then"] == 1.5


def test_the_works_behind_the_bounds_are_what_one_node_with_room_for_all_computes() -> None:
    trace = a_trace(100)
    alone = replay(replace(PLAN, prefill_nodes=1, node_tokens=1 << 30, chunk_tokens=1 << 30), trace, "ours")

    assert sum(works_s(trace, PLAN.cost)) == pytest.approx(alone.work_s[0])


def test_copies_of_a_trace_are_as_many_requests_and_share_nothing() -> None:
    trace = a_trace(50)
    twice = copied(trace, 2, seed=1)

    assert len(twice.arrivals) == 100
    assert twice.ceiling() == pytest.approx(trace.ceiling())
    assert [one.at_s for one in twice.arrivals] == sorted(one.at_s for one in twice.arrivals)
    assert copied(trace, 1, seed=1).ceiling() == pytest.approx(trace.ceiling())


@pytest.mark.parametrize(("copies", "repeats", "most"), [(1, 3, 120), (3, 1, 100), (2, 2, 1 << 40)])
def test_a_repeated_trace_is_what_its_requests_are_one_by_one(copies: int, repeats: int, most: int) -> None:
    trace = a_trace(50)
    many = copied(trace, copies, seed=1, repeats=repeats, most=most)
    plain = replace(many, arrivals=tuple(many.arrivals))  # the same requests, made once and kept

    assert len(many.arrivals) == min(most, 50 * copies * repeats)
    assert many.ceiling() == pytest.approx(plain.ceiling())
    assert list(works_s(many, PLAN.cost)) == pytest.approx(list(works_s(plain, PLAN.cost)))
    assert [one.at_s for one in plain.arrivals] == sorted(one.at_s for one in plain.arrivals)
    assert many.arrivals[7:9] == (many.arrivals[7], many.arrivals[8])
    if copies == 1:
        again, first = many.arrivals[50], trace.arrivals[0]
        assert again.at_s == pytest.approx(50 * 0.3)  # a repeat begins where the one before it would have gone on
        assert (again.prompt_tokens, again.blocks[0][4:]) == (first.prompt_tokens, first.blocks[0])
        assert not set(again.blocks) & set(many.arrivals[0].blocks)


def test_a_run_keeps_no_blocks_of_requests_that_have_ended() -> None:
    outcome = replay(PLAN, copied(a_trace(60), 1, seed=1, repeats=3), "ours")

    assert len(outcome.jobs) == 180
    assert not any(job.blocks for job in outcome.jobs)


def test_a_late_index_that_loses_changes_costs_little() -> None:
    trace = a_trace()
    late = replace(PLAN, stale_s=1.0, lost_events=0.05)

    assert summary(replay(late, trace, "ours"), trace)["hit_over_ceiling"] >= 0.85


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [replay(replace(PLAN, lost_events=0.2), a_trace(150), "ours") for _ in range(2)]

    assert [job.finished_s for job in runs[0].jobs] == [job.finished_s for job in runs[1].jobs]
    assert all(job.finished_s is not None for job in runs[0].jobs)


def test_i5_a_burst_with_one_new_prefix_computes_it_once_and_shares_the_rest() -> None:
    shared = [a_block(7, depth) for depth in range(20)]
    burst = tuple(Arrival(0.0, 21 * BLOCK, 10, (*shared, a_block(at, 99))) for at in range(64))
    outcome = replay(PLAN, Trace("burst", BLOCK, burst), "ours")

    assert outcome.hit_blocks >= 64 * 20 - 2 * 20  # the prefix is computed on two of the four nodes at most
    assert max(outcome.work_s) <= 0.5 * 64 * max(job.alone_s for job in outcome.jobs)


def test_o1_at_three_times_capacity_goodput_stays_and_the_rest_is_refused() -> None:
    plan = FleetPlan(prefill_nodes=2, decode_nodes=1, cost=DEVICE, tbt_target_s=0.05)
    trace = unrelated(4000)

    def goodput(rate: float) -> tuple[float, float, float]:
        timed = at_rate(trace, 2, rate)
        jobs = FleetSim(plan, timed, admitting()).run().jobs
        in_time = sum(map(is_in_time, jobs))
        served = sum(job.finished_s is not None for job in jobs)
        return in_time / timed.arrivals[-1].at_s, served / len(jobs), in_time / served

    peak = max(goodput(rate)[0] for rate in (0.5, 0.8, 1.0))
    overloaded, served, kept = goodput(3.0)

    assert overloaded >= 0.9 * peak
    assert served < 0.5  # what was not let in was refused at the door
    assert kept >= 0.9  # and what was let in was kept to its promise


def test_mixed_nodes_serve_everything_too_and_whole_prompts_stop_the_decodes() -> None:
    plan = replace(PLAN, cost=DEVICE, prefill_nodes=2, decode_nodes=2, tbt_target_s=0.05)
    trace = a_trace(200, every_s=0.05)
    late = {}
    for chunked, tokens in ((True, 1024), (False, 1 << 30)):
        jobs = MixedSim(replace(plan, chunk_tokens=tokens), trace, admitting(), chunked=chunked).run().jobs
        served = [job for job in jobs if job.finished_s is not None]
        assert served
        late[chunked] = sum(job.slow_gaps > 0.01 * job.output_tokens for job in served) / len(served)

    assert late[False] > late[True]


@pytest.mark.parametrize(
    ("name", "block_tokens", "ceiling"),
    [("mooncake_conversation", 512, 0.3664), ("agentic_code_weka", 64, 0.9325), ("azure_2023_conv", 512, 0.0)],
)
def test_public_traces_are_read_with_their_ceilings(name: str, block_tokens: int, ceiling: float) -> None:
    trace = public_trace(name)

    assert trace.block_tokens == block_tokens
    assert trace.ceiling() == pytest.approx(ceiling, abs=5e-5)
    assert [one.at_s for one in trace.arrivals] == sorted(one.at_s for one in trace.arrivals)


def test_something_else_is_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"timestamp": 0, "input_length": 10_000, "output_length": 1, "hash_ids": [1]}))
    with pytest.raises(InvalidRequestError, match="block sizes"):
        read(file)
    with pytest.raises(InvalidRequestError, match="missing"):
        read(tmp_path / "missing.jsonl")
    with gzip.open(tmp_path / "x.gz", "wt") as out:
        out.write("no json")
    with pytest.raises(InvalidRequestError, match="not a request trace"):
        read(tmp_path / "x.gz")
