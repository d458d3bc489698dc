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
