"""A cluster with nothing to do does nothing."""

from __future__ import annotations

import time

from cluster.cluster import Cluster, Spec
from idle_yardstick import assert_idle
from oracle_data import oracle_folder, recording

ORACLE = "v3_dense"
FOLDER = oracle_folder(ORACLE)
SPEC = Spec(FOLDER, ring_size="2", pool_pages=64)
WINDOW_S = 10.0


def cpu_times_s(cluster: Cluster) -> dict[int, float]:
    return {one.pid: sum(one.cpu_times()[:2]) for one in cluster.local.processes()}


def test_an_idle_cluster_uses_under_5_percent_of_a_core_and_a_node_under_2(cluster: Cluster) -> None:
    cluster.generate(recording(ORACLE, 333).prompt, max_tokens=24)  # connections exist, sessions have ended
    time.sleep(2)
    nodes = {name: cluster.process(name) for name in ("prefill-0", "decode-0")}
    pids = {name: [top.pid, *(child.pid for child in top.children(recursive=True))] for name, top in nodes.items()}

    before = cpu_times_s(cluster)
    time.sleep(WINDOW_S)
    after = cpu_times_s(cluster)

    assert after.keys() == before.keys()
    used = {pid: (after[pid] - before[pid]) / WINDOW_S for pid in after}
    assert_idle(sum(used.values()), 0.05, used)
    for name, of_node in pids.items():
        assert_idle(sum(used[pid] for pid in of_node), 0.02 * len(of_node), (name, used))
