"""N1-N7: what follows from the facts about the transport."""

from __future__ import annotations

import secrets
import signal
import time

import grpc
import pytest
from pydantic import ValidationError

from cluster.cluster import wait_until
from faults.lab.drive import ME, Stopwatch, drive, refusal
from faults.lab.fleet import GROUP_TIMEOUT_S, LEASE_S, Fleet
from faults.lab.requests import TOKENS, Watched, right
from faults.lab.workload import FOLDER, golden, prompt
from kvrelay.core.settings import load
from kvrelay.core.types import Role
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.proto.convert import incarnation_from_pb
from kvrelay.proto.v1 import common_pb2, decode_pb2
from kvrelay.router.leases import LeaseKeeper, Peer


@pytest.mark.parametrize("stopped_s", [2.0, pytest.param(20.0, marks=[pytest.mark.full, pytest.mark.timeout(240)])])
@pytest.mark.sabotage("no_fence")
def test_n1_what_a_stopped_writer_still_writes_reaches_no_page_in_use(fleet: Fleet, stopped_s: float) -> None:
    """N1. Stopped in mid relay, its request given up and others served from what is free, then continued."""
    fleet.arm("prefill-1", "part", "slow", seconds=0.2)
    fleet.serve_on("prefill-0", "decode-0")
    with drive(fleet, prompt(800, TOKENS), prefill="prefill-1") as one:
        call = one.start_prefill(one.reserve())
        wait_until(lambda: one.decode_stats().sessions.get("receiving", 0) > 0, 10)
        process = fleet.signal("prefill-1", signal.SIGSTOP)
        one.abort(one.decode)
        time.sleep(0.3)
        stats = one.decode_stats()
        assert stats.pinned_pages + stats.quarantined_pages >= TOKENS // 64  # until the fence
        until_s = time.monotonic() + stopped_s
        while time.monotonic() < until_s:
            right(fleet, 801 + int(until_s - time.monotonic()))
        process.send_signal(signal.SIGCONT)
        fleet.remote.clear()
        refusal(lambda: call)
    for seed in range(802, 806):
        right(fleet, seed)
    fleet.make_whole(60)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.sabotage("ranks_outlive_their_ring")
def test_n2_a_ring_with_a_stopped_rank_leaves_as_a_whole_and_the_request_is_redone(fleet: Fleet) -> None:
    """N2. The group timeout ends it; both ranks are new ones afterwards."""
    fleet.arm_all("prefill-1", "prefill.chunk", seconds=0.3)
    fleet.serve_on("prefill-1")
    before = {record.node.name: record.node.start_id for record in fleet.nodes()}
    request = Watched(fleet, 810, timeout_s=60)
    wait_until(lambda: fleet.stats()["prefill-1"].active_requests == 1, 10)
    fleet.signal("prefill-1", signal.SIGSTOP, rank=1)
    watch = Stopwatch()
    request.assert_right()
    assert watch.s < GROUP_TIMEOUT_S + 4
    wait_until(
        lambda: any(r.node.name == "prefill-1" and r.node.start_id != before["prefill-1"] for r in fleet.nodes()), 60
    )
    fleet.make_whole(60)


@pytest.mark.sabotage("leases_never_end")
def test_n3_a_prefill_that_comes_after_the_reservation_ended_writes_nothing(fleet: Fleet) -> None:
    """N3. The router died after Reserve; its Prefill call is delayed."""
    with drive(fleet, prompt(820, TOKENS)) as late:
        ticket = late.reserve()
        wait_until(lambda: late.decode_stats().active_requests == 0, 2 * LEASE_S)
        posted = late.prefill_stats().counters.get("parts_posted_total", 0.0)
        assert refusal(lambda: late.start_prefill(ticket))[0] is not grpc.StatusCode.OK
        assert late.prefill_stats().counters.get("parts_posted_total", 0.0) == posted
    fleet.assert_settled()


@pytest.mark.full
@pytest.mark.sabotage("renewals_of_half")
def test_n4_a_hundred_sessions_are_renewed_on_time(fleet: Fleet) -> None:
    """N4. An idle agent's use of the processor is measured in the cluster's and the decode node's tests."""
    keeper = LeaseKeeper(incarnation_from_pb(ME), lease_s=LEASE_S, max_message_bytes=1 << 20)
    lost: list[str] = []
    with drive(fleet, prompt(830, 40), max_tokens=8) as one:
        peer = Peer(Role.DECODE, one.decode_node.endpoint)
        keeper.start()
        try:
            for _ in range(100):
                one.ref = common_pb2.RequestRef(request_id=secrets.token_hex(8), attempt=1)
                one.reserve()
                keeper.hold(peer, one.ref.request_id, lambda: lost.append("one"))
            time.sleep(3 * LEASE_S)
            assert one.decode_stats().active_requests == 100
            assert lost == []
        finally:
            keeper.stop()
    fleet.assert_settled(2 * LEASE_S + 1)


@pytest.mark.sabotage("digests_unchecked")
def test_n5_a_garbled_address_is_refused_by_its_digest(fleet: Fleet) -> None:
    """N5. Nothing crashes, and the next request is right."""
    with drive(fleet, prompt(840, TOKENS)) as one:
        ticket = one.reserve()
        garbled = bytearray(ticket.address.metadata)
        garbled[len(garbled) // 2] ^= 0x40
        ticket.address.metadata = bytes(garbled)
        _, text = refusal(lambda: one.start_prefill(ticket))
        assert "digest" in text
        one.abort(one.decode)
    fleet.assert_settled()
    right(fleet, 841)


@pytest.mark.sabotage("settings_can_change")
def test_n6_a_pool_is_what_its_process_was_started_with() -> None:
    """N6. There is no call that changes it, and settings are frozen; another size is another process, which has another
    incarnation (R2).
    """
    settings = load(DecodeSettings, ["--model", str(FOLDER), "--pool-pages", "8"], prog="decode")
    with pytest.raises(ValidationError):
        settings.pool_pages = 16
    methods = {method.name for method in decode_pb2.DESCRIPTOR.services_by_name["DecodeNode"].methods}
    assert methods == {
        "Reserve",
        "Attach",
        "Fenced",
        "Decode",
        "Abort",
        "Renew",
        "Drain",
        "Stats",
        "FenceWriter",
    }


@pytest.mark.sabotage("ends_at_prefill_not_told")
def test_n7_a_request_that_ends_with_its_first_token_leaves_nothing_reserved(fleet: Fleet) -> None:
    """N7. By its token limit, and by a stop token, of which decode learns from nobody else than the router."""
    tokens = prompt(850, TOKENS)
    assert len(fleet.generate(tokens, max_tokens=1).token_ids) == 1
    stop = list(golden(850, TOKENS, 1))
    answer = fleet.generate(tokens, max_tokens=300, stop_token_ids=stop)
    assert len(answer.token_ids) == 1
    fleet.assert_settled(1.0)


@pytest.mark.sabotage("deadlines_kept_secret")
def test_n7_a_deadline_shorter_than_the_prefill_leaves_nothing_reserved(fleet: Fleet) -> None:
    """N7. The prefill would take another five seconds."""
    fleet.arm_all("prefill", "prefill.chunk", seconds=1.0)
    code, _ = refusal(lambda: fleet.start(prompt(851, TOKENS), max_tokens=8, timeout_s=0.7))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    fleet.assert_settled(2.0)
