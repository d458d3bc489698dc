"""`python -m faults.lab.figures`: how long faults take to be the client's news, and what safety costs.

failover: SIGKILL of decode in mid stream until the stream goes on, 2,000-token prompt, ring of one. refusal: from the
call to the status. safety: time to the second token with checksums and fence on over off, interleaved pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from cluster.cluster import Answer, Spec, wait_until
from faults.lab import conditions
from faults.lab.fleet import Fleet, running
from faults.lab.workload import FOLDER, prompt

PROMPT_TOKENS = 2000
OUTPUT_TOKENS = 45
# The default lease, fence and registry times are the lab's short ones; chunks are the product's default.
SPEC = Spec(FOLDER, ring_size="1", prefill=1, decode=2, pool_pages=400, max_model_len=2048)
OFF = "safety_off"


def failover_s(fleet: Fleet, seed: int) -> float:
    """Kill the decode node of a stream that has run for a while; return the longest silence that the client saw."""
    fleet.make_whole(60)
    retries = fleet.retries()
    times: list[float] = []
    answer = Answer()
    fleet.serve_on(f"decode-{seed % 2}")  # in turns: a node that dies too often stays down
    call = fleet.start(prompt(seed, PROMPT_TOKENS), max_tokens=OUTPUT_TOKENS)

    def read() -> None:
        for event in call:
            answer.take(event, time.monotonic())
            times.append(time.monotonic())

    fleet.arm_all("decode", "decode.step", seconds=0.05)
    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: len(answer.token_ids) >= 10, 60)
    node = answer.accepted.nodes.decode_node
    process = fleet.process(node)
    killed_s = time.monotonic()
    process.send_signal(signal.SIGKILL)
    reader.join(60)
    after = [at_s for at_s in times if at_s > killed_s]
    gaps = [(b - a) for a, b in zip([killed_s, *after], after, strict=False)]
    assert len(answer.token_ids) == OUTPUT_TOKENS
    assert fleet.retries() == retries + 1
    return max(gaps)


def refusal_s(fleet: Fleet, seed: int) -> float:
    began_s = time.monotonic()
    try:
        list(fleet.start(prompt(seed, 100), max_tokens=8))
    except grpc.RpcError:
        return time.monotonic() - began_s
    raise AssertionError("not refused")


def second_token_s(fleet: Fleet, seed: int) -> float:
    return fleet.generate(prompt(seed, PROMPT_TOKENS), max_tokens=3).token_times_s[1]


def interval(values: list[float], of: Callable[[list[float]], float]) -> list[float]:
    """Return the 95% bootstrap interval."""
    dice = random.Random(0)
    found = sorted(of(dice.choices(values, k=len(values))) for _ in range(2000))
    return [round(found[50], 4), round(found[1949], 4)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="figures")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=7)
    options = parser.parse_args()
    result: dict[str, Any] = {**conditions.now(), "prompt_tokens": PROMPT_TOKENS}
    with running(SPEC) as fleet:
        ratios: list[float] = []
        second_token_s(fleet, 2000)
        for pair in range(options.pairs):
            took: dict[bool, float] = {}
            for on in (True, False) if pair % 2 else (False, True):
                fleet.remote.heal() if on else fleet.remote.sabotage(OFF)
                took[on] = second_token_s(fleet, 3000 + 2 * pair + on)
            ratios.append(took[True] / took[False])
        fleet.remote.heal()
        result["safety_on_over_off"] = {
            "median": round(statistics.median(ratios), 4),
            "interval_95": interval(ratios, statistics.median),
            "ratios": [round(one, 4) for one in ratios],
        }
        fleet.arm("prefill-0", "prefill.accept", "invalid")
        refusals = [refusal_s(fleet, 4000 + number) for number in range(20)]
        fleet.remote.clear()
        result["refusal_s"] = {"median": round(statistics.median(refusals), 4), "worst": round(max(refusals), 4)}
        kills = [failover_s(fleet, 5000 + number) for number in range(options.kills)]
        result["kill_to_continued_s"] = {
            "median": round(statistics.median(kills), 3),
            "all": [round(k, 3) for k in kills],
        }
    result["load_after"] = [round(one, 2) for one in os.getloadavg()]
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
