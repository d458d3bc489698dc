"""R2-R5: nodes come, go, hang and come back under the same name."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.cluster import CALL_S, wait_until
from faults.lab.drive import Drive, drive, refusal
from faults.lab.fleet import LEASE_S, STUCK_AFTER_S, Fleet, further_node
from faults.lab.requests import TOKENS, Watched, right
from faults.lab.workload import prompt


def pair_of(fleet: Fleet, tokens: list[int], *, prefill: str) -> tuple[str, str]:
    """Return which nodes serve a request that this prefill node must compute."""
    fleet.serve_on(prefill)
    nodes = fleet.generate(tokens, max_tokens=8).finished.nodes
    return nodes.prefill_node, nodes.decode_node


def serving(endpoint: str) -> bool:
    with grpc.insecure_channel(endpoint) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.sabotage("incarnations_by_name")
def test_r2_a_restarted_node_is_another_one_under_the_same_name(fleet: Fleet) -> None:
    """R2. What was meant for its former life is refused; what is meant for it now is right."""
    with drive(fleet, prompt(510, TOKENS)) as before:
        old = before.decode_node.node
    fleet.signal("decode-0", signal.SIGKILL)
    wait_until(lambda: any(r.node.name == "decode-0" and r.node != old for r in fleet.nodes()), 60)
    fleet.make_whole(60)
    with drive(fleet, prompt(511, TOKENS)) as after:
        code, text = refusal(lambda: after.reserve(node=old))
        assert code is grpc.StatusCode.UNAVAILABLE, text
    for seed in range(512, 516):
        right(fleet, seed)


@pytest.mark.full
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
    """R4. Nodes of another dtype join. Each request is served by a pair of one layout, and either pair serves alone."""
    before = fleet.retries()
    with further_node(fleet, "decode-0", "decode-x", dtype="bfloat16"):
        for seed in range(530, 534):
            right(fleet, seed, num_tokens=100)
        assert fleet.stats()["decode-x"].counters.get("sessions_reserved_total", 0) == 0
        with further_node(fleet, "prefill-0", "prefill-x", dtype="bfloat16"):
            layouts = {record.node.name: record.layout_fingerprint for record in fleet.nodes()}
            assert layouts["prefill-x"] == layouts["decode-x"] != layouts["decode-0"]
            pairs = [
                pair_of(fleet, prompt(534 + turn, 100), prefill=("prefill-0", "prefill-x")[turn % 2])
                for turn in range(12)
            ]
    assert all(layouts[prefill] == layouts[decode] for prefill, decode in pairs)
    assert len({layouts[prefill] for prefill, _ in pairs}) == 2, pairs
    assert fleet.retries() == before


@pytest.mark.parametrize(
    ("node", "point"),
    [
        ("decode-0", "decode.step"),
        ("prefill-0", "transfer"),
        *(
            pytest.param(node, point, marks=pytest.mark.full)
            for node, point in (
                ("decode-0", "transfer"),
                ("decode-0", "lease"),
                ("prefill-0", "prefill.chunk"),
                ("prefill-0", "lease"),
            )
        ),
    ],
)
@pytest.mark.sabotage("nothing_is_ever_stuck")
def test_r5_a_node_that_makes_no_progress_is_not_serving_and_gets_nothing(fleet: Fleet, node: str, point: str) -> None:
    """R5. One of its threads hangs; health says so, it leaves the registry, and once it moves again it is back."""
    endpoint = next(record.endpoint for record in fleet.nodes() if record.node.name == node)
    fleet.serve_on(node)
    fleet.arm(node, point, seconds=60.0, count=1)
    held = Watched(fleet, 540 + len(point), timeout_s=60)
    wait_until(lambda: not serving(endpoint), STUCK_AFTER_S + 10)
    wait_until(lambda: node not in {record.node.name for record in fleet.nodes()}, 20)
    right(fleet, 541)
    fleet.remote.clear()
    held.assert_right()
    wait_until(lambda: serving(endpoint), 20)


@pytest.mark.sabotage("nothing_is_ever_stuck")
def test_r5_a_router_whose_lease_thread_hangs_is_not_serving_until_it_moves_again(fleet: Fleet) -> None:
    """R5. Clients that watch its health go to another router."""
    fleet.arm("router", "lease", seconds=60.0, count=1)
    wait_until(lambda: not serving(fleet.endpoint), STUCK_AFTER_S + 2 * LEASE_S + 4)
    fleet.remote.clear()
    wait_until(lambda: serving(fleet.endpoint), 20)
    right(fleet, 550)
