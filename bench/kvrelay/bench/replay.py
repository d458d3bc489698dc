"""`kvrelay bench replay`: one trace over a simulated fleet with one policy, under a service class when asked to.

The placement, the books, the admission and the index mirror are the router's own; nodes and clock are simulated.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from kvrelay.bench import report
from kvrelay.bench.bounds import evenness_bounds, works_s
from kvrelay.bench.goodput import is_in_time
from kvrelay.bench.placement import DEVICE, quantile, replay, slowed, summary
from kvrelay.bench.sim_fleet import FleetPlan
from kvrelay.bench.trace import copied, read
from kvrelay.router.admission import TARGETS, Slo


def run(options: argparse.Namespace) -> int:
    """Replay, print a JSON object as the last line, write the result file when asked to."""
    trace = read(Path(options.trace), seed=options.seed)
    trace = copied(trace, options.copies, seed=options.seed, repeats=options.repeat, most=options.requests)
    plan = FleetPlan(
        prefill_nodes=options.nodes,
        decode_nodes=options.decode or max(1, options.nodes // 2),
        node_tokens=options.node_tokens,
        cost=slowed(DEVICE, options.slowdown),
        stale_s=options.stale_s,
        lost_events=options.lost_events,
        tbt_target_s=TARGETS[Slo.INTERACTIVE].between_tokens_s,
        seed=options.seed,
    )
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    outcome = replay(plan, trace, options.policy)
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    served = [job for job in outcome.jobs if job.finished_s is not None and job.first_token_s is not None]
    between_s = [
        (job.finished_s - job.first_token_s) / (job.output_tokens - 1)
        for job in served
        if job.output_tokens > 1 and job.finished_s is not None and job.first_token_s is not None
    ]
    span_s = max((job.finished_s or 0.0 for job in served), default=0.0) - trace.arrivals[0].at_s
    result: dict[str, Any] = {
        "trace": trace.name, "policy": options.policy, "nodes": options.nodes, "node_tokens": options.node_tokens,
        "requests": len(outcome.jobs), "ceiling": round(trace.ceiling(), 4),
        "bounds": evenness_bounds(list(works_s(trace, plan.cost)), plan.prefill_nodes), **summary(outcome, trace),
        "tbt_mean_p50_s": round(quantile(between_s, 0.5), 5), "tbt_mean_p99_s": round(quantile(between_s, 0.99), 5),
        "goodput_per_s": round(sum(map(is_in_time, served)) / max(span_s, 1e-9), 3),
        "refusals": len(outcome.jobs) - len(served),
        "copies": options.copies, "repeats": options.repeat, "took_s": round(took_s, 1),
        "took_cpu_s": round(took_cpu_s, 1), "cpu_ms_per_request": round(1e3 * took_cpu_s / len(outcome.jobs), 3),
    }  # fmt: skip
    if options.out:
        print(report.write(Path(options.out), device="sim", bench="replay", result=result))
    print(json.dumps(result))
    return 0
