"""`kvrelay bench goodput`: requests per second that keep their targets, under more and more load.

The same simulated devices are used in three ways: split into prefill and decode pools, mixed with chunks of prompts in
every decode step, and mixed with whole prompts between decode steps. A request is in time when the first token came
within the wait that its class is promised plus three times what its prompt takes on an idle device, and at most 1% of
its gaps between tokens were longer than promised. Refused requests are not in time. Capacity is the highest load at
which 95% of all requests are in time. The same is done with shorter prompts, to find from where on splitting pays.
What the hand-off takes on the wire is left out: it is hidden behind the prefill, all but a few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrelay.bench import report
from kvrelay.bench.placement import DEVICE
from kvrelay.bench.sim_fleet import Events, FleetPlan, FleetSim, Outcome
from kvrelay.bench.sim_mixed import MixedSim
from kvrelay.bench.sim_nodes import Job
from kvrelay.bench.sim_policies import Ours, Policy
from kvrelay.bench.trace import Trace, read
from kvrelay.index.mirror_state import MirrorState
from kvrelay.router.admission import TARGETS, Slo
from kvrelay.router.cost import compute_s

SLO = Slo.INTERACTIVE
PROMPTS = {"as they are": 1.0, "cut to a quarter": 1 / 4, "cut to a sixteenth": 1 / 16}  # answers are as they are
IN_TIME = 0.95  # share of all requests that are in time at capacity
OVERLOAD = 3.0  # times capacity
_LEAST_RATE, _MOST_RATE, _HALVINGS = 0.05, 6.0, 6  # rates are multiples of what uncached prefill alone would fill
_CHUNK_TOKENS = 1024  # of a mixed step
_WHOLE_PROMPT_TOKENS = 1 << 30
_MAX_SLOW_GAPS = 0.01


def run(options: argparse.Namespace) -> int:
    """Measure, print a table and a JSON object, write the result file when asked to."""
    trace = read(Path(options.trace), seed=options.seed)
    trace = replace(trace, arrivals=trace.arrivals[: options.requests])
    result: dict[str, Any] = {"trace": trace.name, "requests": len(trace.arrivals), "devices": options.devices}
    for name, scale in PROMPTS.items():
        rows = compare(cut(trace, scale), devices=options.devices, seed=options.seed)
        split, chunked, _ = (row["capacity"]["goodput"] for row in rows.values())
        result[name] = {"split_over_chunked": round(split / max(chunked, 1e-9), 3), "arrangements": rows}
        print(
            f"prompts {name}, split over chunked {split / max(chunked, 1e-9):.2f}; requests in time per second and "
            f"device, at capacity and at {OVERLOAD:g} times its load"
        )
        for arrangement, row in rows.items():
            at, over = row["capacity"], row["overload"]
            print(
                f"  {arrangement:20}{at['goodput']:9.2f}{over['goodput']:9.2f}, "
                f"ratio {row['overload_over_capacity']:.2f}, refused {over['refused']:.0%}, "
                f"late of admitted {over['late_of_admitted']:.1%}",
                flush=True,
            )
    if options.out:
        print(report.write(Path(options.out), device="sim", bench="goodput", result=result))
    print(json.dumps(result))
    return 0


def cut(trace: Trace, scale: float) -> Trace:
    """Return the trace with shorter prompts and the same answers."""
    if scale == 1.0:
        return trace
    arrivals = tuple(
        replace(
            one,
            prompt_tokens=max(64, int(one.prompt_tokens * scale)),
            blocks=one.blocks[: int(one.prompt_tokens * scale) // trace.block_tokens],
        )
        for one in trace.arrivals
    )
    return replace(trace, arrivals=arrivals)


def compare(trace: Trace, *, devices: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return the capacity of each arrangement; of the splits only the best one."""
    plan = FleetPlan(cost=DEVICE, tbt_target_s=TARGETS[SLO].between_tokens_s, seed=seed)
    splits = {
        f"split {prefill}+{devices - prefill}": measure(
            trace,
            devices,
            lambda timed, n=prefill: FleetSim(  # type: ignore[misc]
                replace(plan, prefill_nodes=n, decode_nodes=devices - n), timed, admitting
            ).run(),
        )
        for prefill in sorted({devices // 4, devices // 2, devices * 3 // 4} - {0})
    }
    best = max(splits, key=lambda name: splits[name]["capacity"]["goodput"])
    mixed = replace(plan, prefill_nodes=devices, decode_nodes=devices)
    return {
        best: splits[best],
        "mixed, chunked": measure(trace, devices, lambda timed: run_mixed(mixed, timed, chunked=True)),
        "mixed, unchunked": measure(trace, devices, lambda timed: run_mixed(mixed, timed, chunked=False)),
    }


def admitting(mirror: MirrorState, events: Events) -> Policy:
    """Return the router's placement with its admission."""
    return Ours(mirror, events.clock, slo=SLO)


def run_mixed(plan: FleetPlan, trace: Trace, *, chunked: bool) -> Outcome:
    tokens = _CHUNK_TOKENS if chunked else _WHOLE_PROMPT_TOKENS
    return MixedSim(replace(plan, chunk_tokens=tokens), trace, admitting, chunked=chunked).run()


def at_rate(trace: Trace, devices: int, multiple: float) -> Trace:
    """Return the trace with its times scaled, so that uncached prefills would fill the devices `multiple` times."""
    work_s = sum(alone_s(one.prompt_tokens) for one in trace.arrivals)
    first_s, last_s = trace.arrivals[0].at_s, trace.arrivals[-1].at_s
    factor = work_s / devices / multiple / max(last_s - first_s, 1e-9)
    return replace(trace, arrivals=tuple(replace(one, at_s=(one.at_s - first_s) * factor) for one in trace.arrivals))


def alone_s(prompt_tokens: int) -> float:
    return compute_s(DEVICE, tokens=prompt_tokens, cached=0, ring_size=1, break_even_tokens=1)


def is_in_time(job: Job) -> bool:
    if job.first_token_s is None or job.finished_s is None:
        return False
    if job.first_token_s - job.at_s > TARGETS[SLO].wait_s + 3 * alone_s(job.prompt_tokens):
        return False
    return job.slow_gaps <= _MAX_SLOW_GAPS * job.output_tokens


def measure(trace: Trace, devices: int, simulate: Callable[[Trace], Outcome]) -> dict[str, Any]:
    """Find the capacity by halving, and look at what is left of its goodput under overload."""
    low, high = _LEAST_RATE, _MOST_RATE
    capacity = _point(trace, devices, low, simulate)
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        point = _point(trace, devices, middle, simulate)
        if point["in_time"] >= IN_TIME:
            low, capacity = middle, point
        else:
            high = middle
    overload = _point(trace, devices, OVERLOAD * capacity["rate"], simulate)
    return {
        "capacity": capacity,
        "overload": overload,
        "overload_over_capacity": round(overload["goodput"] / max(capacity["goodput"], 1e-9), 3),
    }


def _point(trace: Trace, devices: int, rate: float, simulate: Callable[[Trace], Outcome]) -> dict[str, float]:
    timed = at_rate(trace, devices, rate)
    jobs = simulate(timed).jobs
    in_time = sum(map(is_in_time, jobs))
    served = sum(job.finished_s is not None for job in jobs)
    return {
        "rate": round(rate, 3),
        "goodput": round(in_time / max(timed.arrivals[-1].at_s, 1e-9) / devices, 3),
        "in_time": round(in_time / len(jobs), 4),
        "refused": round(1 - served / len(jobs), 4),
        "late_of_admitted": round(1 - in_time / max(served, 1), 4),
    }
