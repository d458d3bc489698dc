"""A cluster with nothing to do does nothing."""

from __future__ import annotations

import time

from cluster.cluster import Cluster
from cluster.specs import RING_OF_TWO
from idle import Waiting, assert_idle
from oracle_data import recording

ORACLE = "v3_noaux"
SPEC = RING_OF_TWO


def test_an_idle_cluster_uses_under_5_percent_of_a_core_and_a_node_under_2(cluster: Cluster) -> None:
    cluster.generate(recording(ORACLE, 333).prompt, max_tokens=24)  # connections exist, sessions have ended
    time.sleep(2)
    before = [one.pid for one in cluster.local.processes()]
    parties = {"the cluster": Waiting(before, 0.05)}
    for name in ("prefill-0", "decode-0"):
        top = cluster.process(name)
        of_node = [top.pid, *(child.pid for child in top.children(recursive=True))]
        parties[name] = Waiting(of_node, 0.02 * len(of_node))

    assert_idle(parties, window_s=5.0)

    assert [one.pid for one in cluster.local.processes()] == before
