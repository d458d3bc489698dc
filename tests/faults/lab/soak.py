"""`python -m faults.lab.soak`: random traffic under random faults for some minutes, every answer compared.

Everything random comes from one seed, which is printed; the same seed plays the same schedule of faults and requests.
The end is 0 wrong answers, 0 leaked pages and 0 stuck requests, or exit code 1.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import grpc

from cluster.cluster import Answer, status_of
from faults.lab import conditions, part_faults
from faults.lab.fleet import Fleet, running
from faults.lab.workload import SPEC, golden, prompt

CLIENTS = 4
REQUEST_S = 45.0
SETTLE_S = 60.0
NUM_PROMPTS, LONGEST, SHORT, OUTPUT = 60, 900, 50, (1, 2, 8, 24, 60)
Strike = Callable[[Fleet, random.Random], None]
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# Statuses that a client may meet while nodes die; anything else is a wrong answer.
CLEAR = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}


@dataclass(slots=True)
class Result:
    seed: int
    minutes: float
    requests: int = 0
    right: int = 0
    cancelled: int = 0
    failed_clearly: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    fetched: dict[str, int] = field(default_factory=dict)  # prompt tokens, by node, since each last began to run
    loaded_blocks: dict[str, int] = field(default_factory=dict)  # from host memory, the same
    pauses: dict[str, int] = field(default_factory=dict)  # of chunks for shorter prompts, the same
    worst_outcome_s: float = 0.0  # from a fault to the end of a request that it met

    @property
    def good(self) -> bool:
        return not (self.wrong or self.stuck or self.leaked) and self.right > 0

    def shown(self) -> dict[str, Any]:
        """Return the result as JSON can say it; of what went wrong only how often."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: len(value) if isinstance(value, list) else value for name, value in values.items()}


def length_of(which: int) -> int:
    """Return the length of a prompt: a third of them are so short that chunks give way to them."""
    return random.Random(which).randrange(1, LONGEST if which % 3 else SHORT)


@dataclass(frozen=True, slots=True)
class Plan:
    """One request."""

    which: int
    num_tokens: int
    num_output: int
    cancel_after_s: float | None

    @classmethod
    def draw(cls, dice: random.Random) -> Plan:
        which = dice.randrange(NUM_PROMPTS)
        length = length_of(which)
        cancel = dice.random() * 0.5 if dice.random() < 0.15 else None
        return cls(which, length, dice.choice(OUTPUT), cancel)


class Soak:
    def __init__(self, fleet: Fleet, result: Result) -> None:
        self._fleet, self._result = fleet, result
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._last_fault_s: float | None = None

    def run(self, minutes: float) -> None:
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        self._faults(time.monotonic() + 60 * minutes)
        self._over.set()
        for client in clients:
            client.join(REQUEST_S + 15)
            if client.is_alive():
                self._result.stuck.append("a client thread did not end")
        try:
            self._fleet.make_whole(SETTLE_S)
        except AssertionError as err:
            self._result.leaked += str(err).splitlines()

    # -- traffic

    def _client(self, number: int) -> None:
        dice = random.Random(f"{self._result.seed}/client {number}")
        while not self._over.is_set():
            plan = Plan.draw(dice)
            began_s = time.monotonic()
            outcome = self._request(plan)
            ended_s = time.monotonic()
            with self._lock:
                self._note(plan, outcome, began_s, ended_s)
            if outcome == "UNAVAILABLE":
                time.sleep(0.5)  # as a polite client would

    def _request(self, plan: Plan) -> str:
        call = self._fleet.start(prompt(plan.which, plan.num_tokens), max_tokens=plan.num_output, timeout_s=REQUEST_S)
        timer = None
        if plan.cancel_after_s is not None:
            timer = threading.Timer(plan.cancel_after_s, call.cancel)
            timer.start()
        answer = Answer()
        try:
            for event in call:
                answer.take(event, 0.0)
        except grpc.RpcError as err:
            code, text = status_of(err)
            if code is grpc.StatusCode.CANCELLED and timer is not None:
                return "cancelled"
            return code.name if code in CLEAR else f"wrong status {code.name}: {text}"
        finally:
            if timer is not None:
                timer.cancel()
        wanted = golden(plan.which, plan.num_tokens, max(OUTPUT))[: plan.num_output]
        if tuple(answer.token_ids) == wanted:
            return "right"
        where = (
            f"request {answer.accepted.request_id} on {answer.finished.nodes}" if answer.finished else "not finished"
        )
        return f"wrong text: {' '.join(where.split())}: {_difference(answer.token_ids, wanted)}"

    def _note(self, plan: Plan, outcome: str, began_s: float, ended_s: float) -> None:
        result = self._result
        result.requests += 1
        if ended_s - began_s > REQUEST_S + 2:
            result.stuck.append(f"{plan} took {ended_s - began_s:.1f} s")
        if outcome == "right":
            result.right += 1
        elif outcome == "cancelled":
            result.cancelled += 1
        elif outcome.startswith("wrong"):
            result.wrong.append(f"{plan}: {outcome}")
        else:
            result.failed_clearly[outcome] += 1
        fault_s = self._last_fault_s
        if fault_s is not None and began_s <= fault_s <= ended_s:
            result.worst_outcome_s = max(result.worst_outcome_s, ended_s - fault_s)

    # -- faults

    def _faults(self, until_s: float) -> None:
        dice = random.Random(f"{self._result.seed}/faults")
        while time.monotonic() < until_s:
            time.sleep(dice.uniform(0.5, 3.0))
            kind = dice.choices(list(_FAULTS), [weight for weight, _ in _FAULTS.values()])[0]
            with self._lock:
                self._last_fault_s = time.monotonic()
                self._result.faults[kind.split(" ")[0]] += 1
            try:
                _FAULTS[kind][1](self._fleet, dice)
            except (OSError, StopIteration, grpc.RpcError):
                continue  # that process is just being restarted


def _counted(fleet: Fleet, name: str) -> dict[str, int]:
    """Return a counter of each prefill node; nothing when a node does not answer."""
    try:
        counters = {node: stats.counters for node, stats in fleet.stats().items() if node.startswith("prefill")}
    except grpc.RpcError:
        return {}
    return {node: int(of_node.get(name, 0.0)) for node, of_node in counters.items()}


def _difference(got: Sequence[int], wanted: Sequence[int]) -> str:
    """Say where an answer leaves what was wanted."""
    at = next(
        (at for at, (one, other) in enumerate(zip(got, wanted, strict=False)) if one != other),
        min(len(got), len(wanted)),
    )
    ours, theirs = list(got[at : at + 8]), list(wanted[at : at + 8])
    return f"{len(got)} tokens of {len(wanted)}, from token {at} on {ours}, not {theirs}"


def _part(kind: str) -> Strike:
    def strike(fleet: Fleet, dice: random.Random) -> None:
        node = dice.choice(NODES[:2])
        fleet.arm(node, "part", kind, skip=dice.randrange(4), count=dice.randint(1, 2), seconds=dice.uniform(0.05, 0.5))

    return strike


def _refuse(fleet: Fleet, dice: random.Random) -> None:
    point, node = dice.choice(
        [
            ("prefill.accept", NODES[0]),
            ("prefill.accept", NODES[1]),
            ("decode.reserve", NODES[2]),
            ("decode.admit", NODES[3]),
        ]
    )
    fleet.arm(node, point, dice.choice(["unavailable", "full"]), count=dice.randint(1, 3))


def _hang(fleet: Fleet, dice: random.Random) -> None:
    point, node = dice.choice([("prefill.chunk", NODES[0]), ("prefill.chunk", NODES[1]), ("decode.step", NODES[2])])
    fleet.arm(node, point, seconds=dice.uniform(0.5, 4.0), count=1)


def _slow_layers(fleet: Fleet, dice: random.Random) -> None:
    """Long enough for shorter prompts to come meanwhile, to which the chunk then gives way."""
    fleet.arm(dice.choice(NODES[:2]), "prefill.layer", seconds=dice.uniform(0.02, 0.3), count=dice.randint(4, 20))


def _room(fleet: Fleet, dice: random.Random) -> None:
    fleet.arm(dice.choice(NODES[2:]), "decode.room", seconds=dice.uniform(0.05, 2.0), count=dice.randint(1, 6))


def _ticket(fleet: Fleet, dice: random.Random) -> None:
    kind = dice.choice(["late", "twice", "refuse", "lost"])
    fleet.arm(NODES[0], "prefill.ticket", kind, seconds=dice.uniform(0.05, 2.0), count=dice.randint(1, 3))


def _kill(fleet: Fleet, dice: random.Random) -> None:
    fleet.signal(dice.choice(NODES), signal.SIGKILL)


def _stop(fleet: Fleet, dice: random.Random) -> None:
    node, rank = dice.choice([*((name, None) for name in NODES), ("prefill-1", 1)])
    process = fleet.signal(node, signal.SIGSTOP, rank=rank)
    time.sleep(dice.uniform(0.2, 5.0))
    process.send_signal(signal.SIGCONT)


def _silent(fleet: Fleet, dice: random.Random) -> None:
    fleet.arm("router", "renew", count=dice.randint(1, 2))


def _index(fleet: Fleet, _: random.Random) -> None:
    fleet.signal("index", signal.SIGKILL)


_FAULTS: dict[str, tuple[float, Strike]] = {
    **{f"part-{kind}": (2.0, _part(kind)) for kind in (*part_faults.KINDS, "delay", "slow")},
    "refuse": (4.0, _refuse),
    "hang": (3.0, _hang),
    "slow-layers": (6.0, _slow_layers),
    "room": (3.0, _room),
    "ticket": (3.0, _ticket),
    "kill": (1.0, _kill),  # a node is back after some seconds; the supervisor's budget allows five a minute
    "stop": (2.0, _stop),
    "no-renewals": (2.0, _silent),
    "index-loss": (0.5, _index),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    parser.add_argument("--no-pulls", action="store_true", help="let no prefill node fetch cached blocks from another")
    parser.add_argument(
        "--host-tier", action="store_true", help="give prefill nodes small pools, and host memory for what these let go"
    )
    options = parser.parse_args()
    environ = {**SPEC.environ, "KVRELAY_PREFILL_PULL_TIMEOUT_S": "0" if options.no_pulls else "10"}
    if options.host_tier:
        environ |= {"KVRELAY_PREFILL_HOST_CACHE_GIB": "0.02", "KVRELAY_PREFILL_POOL_PAGES": "60"}
    spec = replace(SPEC, chunk_tokens=512, environ=environ)
    result, began = Result(options.seed, options.minutes), conditions.now()
    sys.stdout.write(f"soak: seed {options.seed}, {options.minutes:g} minutes\n")
    for which in range(NUM_PROMPTS):
        golden(which, length_of(which), max(OUTPUT))
    with running(spec) as fleet:
        Soak(fleet, result).run(options.minutes)
        result.fetched = _counted(fleet, "pulled_tokens_total")
        result.pauses = _counted(fleet, "chunk_pauses_total")
        result.loaded_blocks = _counted(fleet, "host_loaded_blocks_total")
        logs = "" if result.good else fleet.logs()
    text = json.dumps({**began, **result.shown()}, indent=1) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)
    if not result.good:
        sys.stdout.write("\n".join([*result.wrong, *result.stuck, *result.leaked, logs]) + "\n")
        sys.stdout.write(f"soak: failed; replay with --seed {result.seed}\n")
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
