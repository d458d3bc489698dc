"""`kvrelay bench goodput`: requests per second that keep their targets, under more and more load.

The same simulated devices are used in three ways: split into prefill and decode pools, mixed with chunks of prompts in
every decode step, and mixed with whole prompts between decode steps. A request is in time when the first token came
within the wait that its class is promised plus three times what its prompt takes on an idle device, and at most 1% of
its gaps between tokens were longer than promised. Refused requests are not in time. The peak is the highest goodput of
some loads; overload is three times the load that the peak serves. All is done for the gap between tokens that the
interactive class promises and for a shorter one, and with shorter prompts, to find from where on splitting pays.
What the hand-off takes on the wire is left out: it is hidden behind the prefill, all but a few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
OVERLOAD = 3.0  # times what the peak serves
# Prompts as they are, with the gap between tokens that the class promises and with a short one; and shorter prompts,
# of which there are as many more, so that a run takes as long. Answers are as they are.
CASES = ((1.0, TARGETS[SLO].between_tokens_s), (1.0, 0.015), (1 / 4, TARGETS[SLO].between_tokens_s))
_RATES = (0.3, 0.45, 0.6, 0.8, 1.0, 1.4, 2.0)  # multiples of what uncached prefill alone would fill
_MIXED_SHARE = 0.6  # of the promised gap is for the chunk of a mixed step, the rest for the decode step
_LEAST_CHUNK, _MOST_CHUNK = 128, 4096
_WHOLE_PROMPT_TOKENS = 1 << 30
_MAX_SLOW_GAPS = 0.01


def run(options: argparse.Namespace) -> int:
    """Measure, print a table and a JSON object, write the result file when asked to."""
    trace = read(Path(options.trace), seed=options.seed)
    result: dict[str, Any] = {"trace": trace.name, "requests": options.requests, "devices": options.devices}
    for scale, gap_s in CASES:
        case = f"prompts times {scale:g}, gaps of {gap_s * 1e3:g} ms"
        some = replace(trace, arrivals=trace.arrivals[: int(options.requests / scale)])
        rows = compare(cut(some, scale), devices=options.devices, seed=options.seed, gap_s=gap_s)
        split, chunked, _ = (row["peak"]["goodput"] for row in rows.values())
        result[case] = {"split_over_chunked": round(split / max(chunked, 1e-9), 3), "arrangements": rows}
        print(f"{case}: split over chunked {split / max(chunked, 1e-9):.2f}; requests in time per second and device")
        for arrangement, row in rows.items():
            at, over = row["peak"], row["overload"]
            print(
                f"  {arrangement:18} peak {at['goodput']:6.2f}, at {OVERLOAD:g} times that load "
                f"{over['goodput']:6.2f}, ratio {row['overload_over_peak']:.2f}, refused {over['refused']:.0%}, "
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


def compare(trace: Trace, *, devices: int, seed: int, gap_s: float) -> dict[str, dict[str, Any]]:
    """Return the peak and the overload of each arrangement; of the splits only the best one."""
    plan = FleetPlan(cost=DEVICE, tbt_target_s=gap_s, seed=seed)
    admit = admitting(gap_s)
    splits = {
        f"split {prefill}+{devices - prefill}": measure(
            trace,
            devices,
            lambda timed, n=prefill: FleetSim(  # type: ignore[misc]
                replace(plan, prefill_nodes=n, decode_nodes=devices - n), timed, admit
            ).run(),
        )
        for prefill in sorted({devices // 4, devices // 2, devices * 3 // 4} - {0})
    }
    best = max(splits, key=lambda name: splits[name]["peak"]["goodput"])
    mixed = replace(plan, prefill_nodes=devices, decode_nodes=devices)
    chunk = mixed_chunk(trace, gap_s)

    def unsplit(chunk_tokens: int, *, chunked: bool) -> dict[str, Any]:
        sized = replace(mixed, chunk_tokens=chunk_tokens)
        return measure(trace, devices, lambda timed: MixedSim(sized, timed, admit, chunked=chunked).run())

    return {
        best: splits[best],
        f"mixed, {chunk}-chunks": unsplit(chunk, chunked=True),
        "mixed, unchunked": unsplit(_WHOLE_PROMPT_TOKENS, chunked=False),
    }


def admitting(gap_s: float = TARGETS[SLO].between_tokens_s) -> Callable[[MirrorState, Events], Policy]:
    """Return a maker of the router's placement with its admission, for a class that is promised such gaps."""
    targets = {SLO: replace(TARGETS[SLO], between_tokens_s=gap_s)}
    return lambda mirror, events: Ours(mirror, events.clock, slo=SLO, targets=targets)


def mixed_chunk(trace: Trace, gap_s: float) -> int:
    """Return the largest chunk of a mixed step that leaves room for decode at the trace's mean prompt."""
    context = int(statistics.mean(one.prompt_tokens for one in trace.arrivals))
    chunk = _MOST_CHUNK
    while chunk > _LEAST_CHUNK and _chunk_s(chunk, context) > _MIXED_SHARE * gap_s:
        chunk //= 2
    return chunk


def _chunk_s(chunk: int, context: int) -> float:
    return compute_s(DEVICE, tokens=chunk, cached=context, ring_size=1, break_even_tokens=1)


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
    """Find the peak of goodput, and look at what is left of it at three times the load that it serves."""
    points = [_point(trace, devices, rate, simulate) for rate in _RATES]
    peak = max(points, key=lambda one: one["goodput"])
    per_rate = points[0]["offered"] / points[0]["rate"]
    overload = _point(trace, devices, OVERLOAD * peak["goodput"] / per_rate, simulate)
    peak = max(peak, overload, key=lambda one: one["goodput"])
    return {
        "peak": peak,
        "overload": overload,
        "overload_over_peak": round(overload["goodput"] / max(peak["goodput"], 1e-9), 3),
        "points": points,
    }


def _point(trace: Trace, devices: int, rate: float, simulate: Callable[[Trace], Outcome]) -> dict[str, float]:
    timed = at_rate(trace, devices, rate)
    jobs = simulate(timed).jobs
    in_time = sum(map(is_in_time, jobs))
    served = sum(job.finished_s is not None for job in jobs)
    return {
        "rate": round(rate, 3),
        "offered": round(len(jobs) / max(timed.arrivals[-1].at_s, 1e-9) / devices, 3),
        "goodput": round(in_time / max(timed.arrivals[-1].at_s, 1e-9) / devices, 3),
        "in_time": round(in_time / len(jobs), 4),
        "refused": round(1 - served / len(jobs), 4),
        "late_of_admitted": round(1 - in_time / max(served, 1), 4),
    }
