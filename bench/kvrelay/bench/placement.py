"""`kvrelay bench placement`: what placement makes of the hits that a trace allows, beside four simpler policies.

Replays traces over simulated prefill nodes whose caches hold so many tokens each. Two figures count together: the share
of block references that hit, over what one cache without limit would hit (the ceiling); and how evenly the work lies,
as the most that any node computed over the mean, beside what is possible. Times are those of DeepSeek-V2-Lite on one
H200, measured at 8K to 128K tokens, times --slowdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrelay.bench import policy_chart, report
from kvrelay.bench.bounds import evenness_bounds, works_s
from kvrelay.bench.sim_fleet import Events, FleetPlan, FleetSim, Outcome
from kvrelay.bench.sim_policies import Ours, Policy, simple
from kvrelay.bench.trace import Trace, read
from kvrelay.index.mirror_state import MirrorState
from kvrelay.router.cost import NodeCost

# `bench step` on one H200, each token with experts of its own: prefill of 8K, 32K, 128K tokens 96, 571, 5,234 ms (so
# computed: 96, 570, 5,234); decode step of one sequence at 8K and 128K 3.8 and 4.5 ms, of 32 at 8K and 32K 12.4 and
# 17.6 ms. Batches beyond 32 were not measured: their steps read no more experts, so this says too much for them.
DEVICE = NodeCost(token_s=9.894e-6, pair_s=4.584e-10, step_s=3.49e-3, sequence_s=2.25e-4, context_token_s=6.57e-9)
POLICIES = ("ours", "random", "round-robin", "least-loaded", "longest-prefix")


def slowed(cost: NodeCost, factor: float) -> NodeCost:
    """Return the costs of a device whose prefill is so many times slower."""
    return replace(cost, token_s=cost.token_s * factor, pair_s=cost.pair_s * factor)


def run(options: argparse.Namespace) -> int:
    """Replay every trace with every policy, print a table and a JSON object, write the result file when asked to."""
    if options.png:
        policy_chart.require()
    plan = FleetPlan(
        prefill_nodes=options.nodes,
        node_tokens=options.node_tokens,
        cost=slowed(DEVICE, options.slowdown),
        seed=options.seed,
    )
    late = replace(plan, stale_s=options.stale_s, lost_events=options.lost_events)
    result: dict[str, Any] = {
        "nodes": options.nodes, "node_tokens": options.node_tokens, "slowdown": options.slowdown, "seed": options.seed,
        "traces": {},
    }  # fmt: skip
    print(f"{'trace':24}{'policy':22}{'hit':>8}{'/ceiling':>10}{'max/mean work':>15}{'TTFT p50':>10}{'p99 s':>8}")
    for file in options.trace:
        trace = read(Path(file), seed=options.seed)
        rows = {policy: summary(replay(plan, trace, policy), trace) for policy in POLICIES}
        late_name = f"ours, {options.stale_s:g} s late, {options.lost_events:.0%} lost"
        rows[late_name] = summary(replay(late, trace, "ours"), trace)
        bounds = evenness_bounds(list(works_s(trace, plan.cost)), plan.prefill_nodes)
        result["traces"][trace.name] = {"ceiling": round(trace.ceiling(), 4), "bounds": bounds, "policies": rows}
        for policy, row in rows.items():
            _print_row(trace.name, policy, row)
        print(
            f"{trace.name:24}max/mean work, bounds: at least {bounds['least']}, knowing all requests "
            f"{bounds['knowing_all']}, even until the worst one comes {bounds['even_until_then']}"
        )
    if options.png:
        policy_chart.write(Path(options.png), result["traces"])
    if options.out:
        print(report.write(Path(options.out), device="sim", bench="placement", result=result))
    print(json.dumps(result))
    return 0


def replay(plan: FleetPlan, trace: Trace, policy: str) -> Outcome:
    """Run one trace with one policy."""
    make: Callable[[MirrorState, Events], Policy]
    if policy == "ours":
        make = lambda mirror, events: Ours(mirror, events.clock)  # noqa: E731 - a factory in a table of one
    else:
        make = lambda mirror, _: simple(policy, mirror, seed=plan.seed)  # noqa: E731
    return FleetSim(plan, trace, make).run()


def summary(outcome: Outcome, trace: Trace) -> dict[str, float]:
    """Return the figures of one run."""
    hit_rate = outcome.hit_blocks / outcome.asked_blocks
    ttfts_s = [job.first_token_s - job.at_s for job in outcome.jobs if job.first_token_s is not None]
    hardest_s = max(job.alone_s for job in outcome.jobs)
    return {
        "hit_rate": round(hit_rate, 4),
        "hit_over_ceiling": round(hit_rate / trace.ceiling(), 4),
        "max_over_mean_work": round(_max_over_mean(outcome.work_s), 3),
        "max_over_mean_computed_tokens": round(_max_over_mean(outcome.computed_tokens), 3),
        # One request cannot be split over nodes: no placement gets the first figure below this.
        "hardest_request_over_mean_work": round(hardest_s / statistics.mean(outcome.work_s), 3),
        "ttft_p50_s": round(quantile(ttfts_s, 0.5), 3),
        "ttft_p99_s": round(quantile(ttfts_s, 0.99), 3),
        "decision_p50_us": round(quantile(outcome.decision_s, 0.5) * 1e6, 1),
        "decision_p99_us": round(quantile(outcome.decision_s, 0.99) * 1e6, 1),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _max_over_mean(values: Sequence[float]) -> float:
    mean = statistics.mean(values)
    return max(values) / mean if mean else 0.0


def _print_row(trace: str, policy: str, row: dict[str, float]) -> None:
    print(
        f"{trace:24}{policy:22}{row['hit_rate']:8.4f}{row['hit_over_ceiling']:10.4f}{row['max_over_mean_work']:15.3f}"
        f"{row['ttft_p50_s']:10.3f}{row['ttft_p99_s']:8.2f}",
        flush=True,
    )
