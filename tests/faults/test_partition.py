"""A cut between prefill and the rest, in the midst of a relay, and its healing. Real links: network namespaces."""

from __future__ import annotations

import time

import pytest

from cluster.cluster import status_of, wait_until
from faults.lab import partition
from faults.lab.requests import TOKENS, Watched, right
from faults.lab.workload import FOLDER
from kvrelay.proto.v1 import fleet_pb2

_WHY = partition.refusal()
# Keepalive takes 15 s to miss a peer, which needs not even tell that it is gone.
NOTICED_S = 25.0


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(_WHY is not None, reason=str(_WHY))
def test_a_cut_in_mid_relay_is_a_clear_status_in_time_and_after_healing_all_is_as_before() -> None:
    with partition.running(FOLDER) as hosts:
        right(hosts, 950)
        hosts.remote.arm("prefill-0", "part", "slow", seconds=0.3)
        request = Watched(hosts, 951, timeout_s=60)
        decode = next(one for one in hosts.nodes() if one.role == fleet_pb2.NODE_ROLE_DECODE)
        wait_until(lambda: hosts._stats_of(decode).sessions.get("receiving"), 10, hosts.logs)
        hosts.cut()
        cut_s = time.monotonic()
        request.end(NOTICED_S)
        assert request.error is not None, hosts.logs()
        assert status_of(request.error)[0].name == "UNAVAILABLE", hosts.logs()
        assert time.monotonic() - cut_s < NOTICED_S

        held = hosts._stats_of(decode)
        assert held.active_requests == 0
        assert held.pinned_pages + held.quarantined_pages >= TOKENS // 64  # nothing has proven the writer's end
        hosts.remote.clear()
        hosts.heal()
        wait_until(lambda: len(hosts.nodes()) == 2 and not hosts.unsettled(), 60, hosts.logs)
        for seed in (951, 952):
            right(hosts, seed)
        hosts.assert_settled()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(_WHY is not None, reason=str(_WHY))
@pytest.mark.sabotage("links_never_end")
def test_a_cut_until_the_transport_gives_up_keeps_no_page_once_it_has_healed(sabotaged: str | None) -> None:
    """No fence can be written any more, and nobody is restarted: the end of the link is the proof."""
    with partition.running(FOLDER, tcp_retries=3, breakage=sabotaged) as hosts:
        right(hosts, 960)
        before = {record.node.name: record.node.start_id for record in hosts.nodes()}
        hosts.remote.arm("prefill-0", "part", "slow", seconds=0.3)
        request = Watched(hosts, 961, timeout_s=60)
        decode = next(one for one in hosts.nodes() if one.role == fleet_pb2.NODE_ROLE_DECODE)
        wait_until(lambda: hosts._stats_of(decode).sessions.get("receiving"), 10, hosts.logs)
        hosts.cut()
        request.end(NOTICED_S)
        hosts.remote.clear()
        wait_until(lambda: "is given up: no fence" in hosts.log_of("prefill-0"), 60, hosts.logs)
        wait_until(lambda: hosts._stats_of(decode).quarantined_pages >= TOKENS // 64, 20, hosts.logs)

        hosts.heal()
        wait_until(lambda: len(hosts.nodes()) == 2 and not hosts.unsettled(), 30, hosts.logs)
        assert hosts._stats_of(decode).counters["fences_link_closed_total"] == 1
        assert {record.node.name: record.node.start_id for record in hosts.nodes()} == before
        for seed in (961, 962):
            right(hosts, seed)
        hosts.assert_settled()
