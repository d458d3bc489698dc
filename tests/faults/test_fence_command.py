"""`kvrelay fence`: what an operator says when nothing else can prove that a writer is dead."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from cluster.cluster import wait_until
from faults.lab.drive import drive
from faults.lab.fleet import FENCE_TIMEOUT_S, Fleet
from faults.lab.requests import TOKENS, right
from faults.lab.workload import prompt


def fence(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "fence", *arguments, "--endpoint", fleet.endpoint]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.sabotage("dead_writers_unnoticed")
def test_pages_kept_from_a_writer_come_back_on_an_operators_word_and_never_while_it_is_registered(fleet: Fleet) -> None:
    fleet.arm("prefill-1", "part", "slow", seconds=0.3)
    with drive(fleet, prompt(400, TOKENS), prefill="prefill-1") as one:
        life = f"{one.prefill_node.node.start_id:016x}"
        refused = fence(fleet, "prefill-1", "--start-id", life)
        assert refused.returncode == 1
        assert "is alive" in refused.stderr

        call = one.start_prefill(one.reserve())
        wait_until(lambda: one.decode_stats().sessions.get("receiving", 0) > 0, 10)
        process = fleet.signal("prefill-1", signal.SIGSTOP)
        one.abort(one.decode)
        wait_until(lambda: one.decode_stats().quarantined_pages > 0, FENCE_TIMEOUT_S + 10)
        call.cancel()

        fleet.local.process.send_signal(signal.SIGSTOP)  # or `up` starts the node anew, which is a proof as well
        process.kill()
        wait_until(lambda: "prefill-1" not in fleet.stats(), 10)
        said = fence(fleet, "prefill-1", "--start-id", life)
        assert said.returncode == 0, said.stderr
        assert int(re.findall(r"(\d+) pages", said.stdout)[0]) >= TOKENS // 64
        wait_until(lambda: one.decode_stats().quarantined_pages == 0, 3)
        fleet.local.process.send_signal(signal.SIGCONT)
    right(fleet, 401)
    fleet.make_whole(90)


def test_a_name_that_nobody_knows_and_an_empty_one_are_refused(fleet: Fleet) -> None:
    said = fence(fleet, "prefill-0")
    assert said.returncode == 0
    assert "decode-0, decode-1, prefill-0, prefill-1: 0 pages" in said.stdout  # all that others may write into
    said = fence(fleet, "no-such-node")
    assert (said.returncode, said.stdout) == (1, "")
    assert "no node has the name 'no-such-node'" in said.stderr
    assert "known: decode-0, decode-1, prefill-0, prefill-1" in said.stderr
    assert fence(fleet, "").returncode == 1
    assert fence(fleet, "prefill-0", "--start-id", "zz").returncode == 2
