"""R1-R5: nodes come, go, hang and come back under the same name."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.cluster import CALL_S, wait_until
from faults.lab.drive import Drive, drive, refusal
from faults.lab.fleet import STUCK_AFTER_S, Fleet
from faults.lab.requests import TOKENS, Watched, right
from faults.lab.workload import golden, prompt


def like(process: psutil.Process, **changed: str) -> subprocess.Popen[bytes]:
    """Start a process of the lab as another one was started, with other values for some options."""
    words, environ = process.cmdline(), process.environ()
    words[words.index("faults.lab.node_main") + 1] = str(psutil.Process().pid)
    for option, value in changed.items():
        words[words.index(f"--{option}") + 1] = value
    return subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def further_node(fleet: Fleet, model_of: str, name: str, **changed: str) -> Iterator[subprocess.Popen[bytes]]:
    added = like(fleet.process(model_of), name=name, **changed)
    try:
        wait_until(lambda: name in {record.node.name for record in fleet.nodes()}, 60)
        yield added
    finally:
        added.send_signal(signal.SIGTERM)
        assert added.wait(30) == 0
        wait_until(lambda: name not in {record.node.name for record in fleet.nodes()}, 10)


def serving(endpoint: str) -> bool:
    with grpc.insecure_channel(endpoint) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


class Load:
    """Requests one after another until told to stop; each must be right."""

    def __init__(self, fleet: Fleet) -> None:
        self.done = 0
        self.wrong: list[str] = []
        self._fleet, self._ended = fleet, threading.Event()
        for seed in range(500, 506):
            golden(seed, 300, 12)
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            try:
                right(self._fleet, 500 + (self.done + number) % 6, num_tokens=300)
            except (AssertionError, grpc.RpcError) as err:
                self.wrong.append(repr(err))
            self.done += 1

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.sabotage("no_avoidance")
def test_r1_a_rolling_restart_of_the_nodes_under_load_fails_no_request(fleet: Fleet) -> None:
    """R1. One after another: a second one of its kind joins, it drains and leaves."""
    load = Load(fleet)
    try:
        for role in ("prefill", "decode"):
            with further_node(fleet, f"{role}-0", f"{role}-next"):
                gone = fleet.process(f"{role}-0")
                gone.kill()  # the supervisor brings it back: a restart that nobody was warned of
                wait_until(lambda one=f"{role}-0": one in fleet.stats(), 60)
    finally:
        load.stop()
    assert load.done > 0
    assert load.wrong == []


@pytest.mark.sabotage("incarnations_by_name")
def test_r2_a_restarted_node_is_another_one_under_the_same_name(fleet: Fleet) -> None:
    """R2. What was meant for its former life is refused; what is meant for it now is right."""
    with drive(fleet, prompt(510, TOKENS)) as before:
        old = before.decode_node.node
    fleet.signal("decode-0", signal.SIGKILL)
    wait_until(lambda: any(r.node.name == "decode-0" and r.node != old for r in fleet.nodes()), 60)
    fleet.make_whole(30)
    with drive(fleet, prompt(511, TOKENS)) as after:
        code, text = refusal(lambda: after.reserve(node=old))
        assert code is grpc.StatusCode.UNAVAILABLE, text
    for seed in range(512, 516):
        right(fleet, seed)


@pytest.mark.sabotage("drain_waits_for_nobody")
def test_r3_a_draining_prefill_node_stays_until_what_it_computed_is_fetched(fleet: Fleet) -> None:
    """R3. SIGTERM with unread latents: exit 0, and the request needs no second attempt."""
    with further_node(fleet, "prefill-0", "prefill-x") as added:
        fleet.arm("prefill-x", "part", "slow", seconds=0.3)
        with drive(fleet, prompt(520, TOKENS), prefill="prefill-x") as one:
            call = one.start_prefill(one.reserve())
            wait_until(lambda: one.decode_stats().sessions.get("receiving", 0) > 0, 10)
            added.send_signal(signal.SIGTERM)
            events = [event.WhichOneof("event") for event in _renewing(one, call)]
        assert events[-1] == "done"
        assert added.wait(20) == 0


def _renewing(one: Drive, call: Iterator[Any]) -> Iterator[Any]:
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.5):
            try:
                one.renew()
            except grpc.RpcError:
                return

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield from call
    finally:
        ended.set()
        thread.join()


@pytest.mark.full
@pytest.mark.sabotage("one_layout_for_all")
def test_r4_two_layouts_in_one_fleet_pair_each_with_its_like(fleet: Fleet) -> None:
    """R4. A decode node of another dtype joins; nothing of the others comes to it."""
    with further_node(fleet, "decode-0", "decode-x", dtype="bfloat16"):
        before = fleet.retries()
        for seed in range(530, 536):
            right(fleet, seed, num_tokens=100)
        stats = fleet.stats()["decode-x"]
        assert stats.counters.get("sessions_reserved_total", 0) == 0
        assert fleet.retries() == before
        layouts = {record.node.name: record.layout_fingerprint for record in fleet.nodes()}
        assert layouts["decode-x"] != layouts["decode-0"]


@pytest.mark.sabotage("steps_are_never_stuck")
def test_r5_a_node_that_makes_no_progress_is_not_serving_and_gets_nothing(fleet: Fleet) -> None:
    """R5. Its step hangs; health says so, it leaves the registry, and once it moves again it is back."""
    endpoint = next(record.endpoint for record in fleet.nodes() if record.node.name == "decode-0")
    fleet.serve_on("decode-0")
    fleet.arm("decode-0", "decode.step", seconds=60.0, count=1)
    held = Watched(fleet, 540, timeout_s=60)
    wait_until(lambda: not serving(endpoint), STUCK_AFTER_S + 4)
    wait_until(lambda: "decode-0" not in {record.node.name for record in fleet.nodes()}, 6)
    right(fleet, 541)
    fleet.remote.clear()
    held.assert_right()
    wait_until(lambda: serving(endpoint), 5)
