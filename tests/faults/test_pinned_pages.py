"""P1-P11: nothing stays pinned, whoever dies, stops, refuses or goes away."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cluster.cluster import Answer, wait_until
from faults.lab.drive import Stopwatch, best_of_three, drive, refusal
from faults.lab.fleet import LEASE_S, Fleet
from faults.lab.requests import TOKENS, Watched, right
from faults.lab.workload import golden, prompt
from kvrelay.core.types import SampledToken
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.values import Manifest
from session_lab import DEADLINE_S, FENCE_S, attach, reservation
from session_lab import LEASE_S as SESSION_LEASE_S


def pinned(fleet: Fleet, name: str) -> int:
    return fleet.stats()[name].pinned_pages


@pytest.mark.sabotage("leases_never_end")
def test_p1_a_lease_that_ends_before_the_data_lands_ends_the_request_and_no_other(fleet: Fleet) -> None:
    """P1. The holder is silent while writes are still on their way; the pages serve another request meanwhile."""
    fleet.arm("prefill-0", "part", "slow", seconds=1.0)
    with drive(fleet, prompt(101, TOKENS)) as one:
        ticket = one.reserve()
        call = one.start_prefill(ticket)
        wait_until(lambda: one.decode_stats().sessions.get("receiving", 0) > 0, 20)
        watch = Stopwatch()
        wait_until(lambda: one.decode_stats().active_requests == 0, 2 * LEASE_S)
        assert watch.s < 2 * LEASE_S
        fleet.serve_on("prefill-1", "decode-0")
        right(fleet, 102)
        assert refusal(lambda: call)[0] is not grpc.StatusCode.OK
    fleet.remote.clear()
    right(fleet, 103)
    fleet.assert_settled()


@pytest.mark.parametrize("state", ["receiving", pytest.param("admitted", marks=pytest.mark.full)])
@pytest.mark.sabotage("sources_never_free")
def test_p2_c8_a_killed_decode_node_pins_nothing_on_prefill(fleet: Fleet, state: str) -> None:
    """P2, C8. SIGKILL in the middle of the relay, and of the answer."""
    if state == "receiving":
        fleet.arm_all("prefill", "part", "slow", seconds=0.4)
    request = Watched(fleet, 110 + len(state), output=300)
    found: list[str] = []

    def there() -> bool:
        found[:] = [name for name, stats in fleet.stats().items() if stats.sessions.get(state, 0)]
        return bool(found)

    wait_until(there, 10)
    fleet.signal(found[0], signal.SIGKILL)
    fleet.remote.clear()
    wait_until(lambda: not any(pinned(fleet, name) for name in ("prefill-0", "prefill-1")), 2 * LEASE_S + 2)
    request.assert_right()
    fleet.make_whole(60)


@pytest.mark.parametrize("state", ["attached", pytest.param("receiving", marks=pytest.mark.full)])
@pytest.mark.sabotage("dead_writers_unnoticed")
def test_p3_c8_a_killed_prefill_node_gives_decodes_pages_back_and_the_request_is_redone(
    fleet: Fleet, state: str
) -> None:
    """P3, C8. The writer is known to be dead when its successor registers; then its pages come back."""
    point = ("prefill.chunk", "on", 20.0) if state == "attached" else ("part", "slow", 0.5)
    fleet.arm_all("prefill", point[0], point[1], seconds=point[2])
    fleet.serve_on("prefill-1")  # a node of one rank gets its ticket later, and attaches only with a layer of its chunk
    request = Watched(fleet, 120 + len(state))
    wait_until(lambda: fleet.sessions(state) and request.answer.accepted.nodes.prefill_node, 10)
    fleet.signal(request.answer.accepted.nodes.prefill_node, signal.SIGKILL)
    fleet.remote.clear()
    request.assert_right()
    fleet.make_whole(60)


@pytest.mark.sabotage("holders_death_unnoticed")
def test_p4_a_killed_router_leaves_nothing_on_either_side(fleet: Fleet) -> None:
    """P4. Between prefill's work and decode's admission."""
    fleet.arm_all("prefill", "part", "slow", seconds=0.5)
    request = Watched(fleet, 130, output=300)
    wait_until(lambda: any(one.sessions.get("receiving", 0) for one in fleet.stats().values()), 10)
    nodes = fleet.nodes()
    fleet.signal("router", signal.SIGKILL)
    fleet.remote.clear()
    fleet.arm_all("decode", "decode.step", seconds=0.05)  # nothing ends by itself
    request.end(10)
    assert request.error is not None
    wait_until(lambda: len(fleet.nodes()) == len(nodes), 20)
    fleet.assert_settled(2 * LEASE_S + 2)
    fleet.remote.clear()
    right(fleet, 131)


@pytest.mark.full
@pytest.mark.sabotage("renewals_stop")
def test_p5_leases_are_renewed_while_every_step_takes_five_seconds(fleet: Fleet) -> None:
    """P5. Steps take more than twice the lease."""
    before = fleet.retries()
    for role, point in (("prefill", "prefill.chunk"), ("decode", "decode.step")):
        fleet.arm_all(role, point, seconds=5.0, count=1)
    requests = [Watched(fleet, 140 + number, num_tokens=100, output=3) for number in range(2)]
    for request in requests:
        request.assert_right()
    assert fleet.retries() == before


@pytest.mark.sabotage("aborts_not_told")
def test_p6_a_refusal_before_admission_reaches_prefill_in_under_a_second(fleet: Fleet) -> None:
    """P6. Decode has everything and takes it not; prefill keeps nothing for it."""

    def free_s(number: int) -> tuple[float]:
        fleet.arm("decode-0", "decode.admit", "full", count=1)
        with drive(fleet, prompt(150 + number, TOKENS)) as one:
            call = one.start_prefill(one.reserve())
            for event in call:
                if event.HasField("first_token"):
                    break
            watch = Stopwatch()
            refusal(lambda: call)
            wait_until(lambda: not one.prefill_stats().pinned_pages, 5.0)
            return (watch.s,)

    best_of_three(free_s, (1.0,))
    fleet.assert_settled()


@pytest.mark.parametrize(
    "moment",
    ["prefill", "relay", "decode", *(pytest.param(one, marks=pytest.mark.full) for one in ("before", "after"))],
)
@pytest.mark.sabotage("router_leaves_legs")
def test_p7_a_client_that_leaves_takes_everything_with_it(fleet: Fleet, moment: str) -> None:
    """P7. At every hop."""
    if moment == "after":
        right(fleet, 160)
    if moment in ("before", "prefill"):
        fleet.arm_all("prefill", "prefill.chunk", seconds=0.7)
    if moment == "relay":
        fleet.arm_all("prefill", "part", "slow", seconds=0.5)
    request = Watched(fleet, 161 + len(moment), output=1300)
    wanted = {"prefill": "reserved", "relay": "receiving", "decode": "admitted", "after": "admitted"}.get(moment)
    if wanted == "reserved":
        wait_until(lambda: any(one.active_requests for one in fleet.stats().values()), 10)
    elif wanted is not None:
        wait_until(lambda: any(one.sessions.get(wanted, 0) for one in fleet.stats().values()), 10)
    request.call.cancel()
    fleet.remote.clear()
    request.end(5)
    fleet.assert_settled(2.0)


@pytest.mark.sabotage("abort_does_nothing")
def test_p8_an_abort_is_legal_wherever_the_request_is_and_ends_it_once(fleet: Fleet) -> None:
    """P8. Only decode knows it, only prefill, both; in mid work; twice; unknown."""
    with drive(fleet, prompt(170, TOKENS)) as only_decode:
        assert not only_decode.abort(only_decode.prefill)
        only_decode.reserve()
        assert only_decode.abort(only_decode.decode)
        assert not only_decode.abort(only_decode.decode)
    fleet.arm("prefill-0", "prefill.chunk", seconds=0.5)
    with drive(fleet, prompt(171, TOKENS)) as both:
        call = both.start_prefill(both.reserve())
        wait_until(lambda: both.prefill_stats().active_requests > 0, 20)
        assert both.abort(both.prefill)
        assert both.abort(both.decode) in (True, False)  # prefill's word may have come first
        assert not both.abort(both.decode)
        assert refusal(lambda: call)[0] in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        assert not both.abort(both.prefill)
    fleet.remote.clear()
    with drive(fleet, prompt(172, TOKENS)) as never:
        assert not never.abort(never.decode)
        assert not never.abort(never.prefill)
    fleet.assert_settled()


@pytest.mark.sabotage("zero_bytes_wait")
def test_p9_a_prompt_that_is_resident_as_a_whole_needs_no_byte() -> None:
    """P9. Zero bytes to send still seal, by the manifest alone."""
    session = ReaderSession(
        reservation(prompt_tokens=16, resident_tokens=16),
        deadline_s=DEADLINE_S, lease_until_s=SESSION_LEASE_S, fence_timeout_s=FENCE_S,
    )  # fmt: skip
    session.handle(attach(), now_s=0)
    actions = session.handle(ev.ManifestIn(Manifest(0, (), SampledToken(1), 16)), now_s=1)
    assert session.state is State.SEALED
    assert ev.Admit() in actions


@pytest.mark.sabotage("time_stands_still")
def test_p10_a_lease_ends_without_any_traffic(fleet: Fleet) -> None:
    """P10. Nothing comes after the reservation, and yet it ends."""
    with drive(fleet, prompt(180, TOKENS)) as one:
        one.reserve()
        time.sleep(LEASE_S + 0.5)
        assert one.decode_stats().active_requests == 0
        assert one.decode_stats().pinned_pages == 0


def _storm(fleet: Fleet, num_requests: int, seed: int) -> int:
    """Run requests, a third of them cancelled at random points; return how many answers were wrong."""
    dice = random.Random(seed)
    lengths = [dice.randrange(30, 400) for _ in range(16)]
    drawn = [dice.randrange(len(lengths)) for _ in range(num_requests)]
    plans = [(which, lengths[which], dice.random() < 1 / 3, dice.random() * 0.4) for which in drawn]

    def one(plan: tuple[int, int, bool, float]) -> bool:
        which, length, cancelled, after_s = plan
        # What is cancelled would go on for long.
        call = fleet.start(prompt(which, length), max_tokens=1500 if cancelled else 16, timeout_s=60)
        timer = threading.Timer(after_s, call.cancel)
        if cancelled:
            timer.start()
        answer = Answer()
        try:
            for event in call:
                answer.take(event, 0.0)
        except grpc.RpcError:
            return cancelled
        finally:
            timer.cancel()
        return tuple(answer.token_ids) == golden(which, length, 16)

    for which, length, _, _ in plans:
        golden(which, length, 16)
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, plans)).count(False)


@pytest.mark.parametrize("num_requests", [100, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
@pytest.mark.sabotage("router_leaves_legs")
def test_p11_after_many_requests_a_third_of_them_cancelled_every_gauge_is_back(fleet: Fleet, num_requests: int) -> None:
    """P11. Pages, requests and sessions are at zero within seconds."""
    assert _storm(fleet, num_requests, seed=num_requests) == 0
    fleet.assert_settled(3.0)
