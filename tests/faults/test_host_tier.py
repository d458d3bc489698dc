"""Copies to and from host memory that take long, and a node that is killed during one: right answers, nothing lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from cluster.cluster import Spec, wait_until
from faults.lab.fleet import Fleet, LabKeeper
from faults.lab.workload import FOLDER, golden, prompt
from kvrelay.proto.convert import pack_ids
from kvrelay.proto.v1 import fleet_pb2

pytestmark = pytest.mark.full  # a lab of its own, with small pools

TOKENS, OUTPUT = 600, 8
SPEC = Spec(
    FOLDER, ring_size="1", prefill=2, decode=1, chunk_tokens=128, pool_pages=24,
    environ={"KVRELAY_PREFILL_HOST_CACHE_GIB": "0.02"},
)  # fmt: skip


@pytest.fixture(scope="module")
def _labs() -> Iterator[LabKeeper]:
    with LabKeeper(SPEC) as keeper:
        yield keeper


def _answer(fleet: Fleet, seed: int) -> list[int]:
    fleet.serve_on("prefill-0")
    return fleet.generate(prompt(seed, TOKENS), max_tokens=OUTPUT).token_ids


def _right(seed: int) -> list[int]:
    return list(golden(seed, TOKENS, OUTPUT))


def _counter(fleet: Fleet, name: str) -> float:
    return fleet.stats()["prefill-0"].counters.get(name, 0.0)


def _drive_out(fleet: Fleet, first: int) -> None:
    """Let prefill-0 compute three prompts; its pool has room for two, so the first one goes to host memory."""
    for seed in range(first, first + 3):
        assert _answer(fleet, seed) == _right(seed)


@pytest.mark.sabotage("copies_end_at_once")
def test_an_evicted_page_is_not_used_before_it_is_copied(fleet: Fleet) -> None:
    loads = _counter(fleet, "host_loads_total")
    fleet.arm("prefill-0", "host.save", seconds=0.7)
    _drive_out(fleet, 800)

    assert _answer(fleet, 800) == _right(800)
    assert _counter(fleet, "host_loads_total") > loads


@pytest.mark.sabotage("copies_end_at_once")
def test_nothing_is_computed_from_a_block_that_is_still_coming(fleet: Fleet) -> None:
    _drive_out(fleet, 810)
    loads = _counter(fleet, "host_loads_total")
    fleet.arm("prefill-0", "host.load", seconds=2.0)

    assert _answer(fleet, 810) == _right(810)
    assert _counter(fleet, "host_loads_total") > loads


def test_a_slow_copy_holds_up_nobody_else(fleet: Fleet) -> None:
    _drive_out(fleet, 820)
    loads = _counter(fleet, "host_loads_total")
    fleet.arm("prefill-0", "host.load", seconds=4.0)
    answers: list[list[int]] = []
    waiting = threading.Thread(target=lambda: answers.append(_answer(fleet, 820)))
    waiting.start()
    wait_until(lambda: _counter(fleet, "host_loads_total") > loads, 5)

    began_s = time.monotonic()
    fleet.serve_on("prefill-0")
    assert fleet.generate(prompt(829, 50), max_tokens=1).token_ids == list(golden(829, 50, 1))
    assert time.monotonic() - began_s < 2.5
    assert not answers
    waiting.join(30)
    assert answers == [_right(820)]


def test_a_node_that_is_killed_while_it_copies_costs_no_answer_and_comes_back_empty(fleet: Fleet) -> None:
    _drive_out(fleet, 830)
    loads = _counter(fleet, "host_loads_total")
    life = next(one.node.start_id for one in fleet.nodes() if one.node.name == "prefill-0")
    fleet.arm("prefill-0", "host.load", seconds=30)
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(_answer(fleet, 830)))
    asking.start()
    wait_until(lambda: _counter(fleet, "host_loads_total") > loads, 5)
    fleet.signal("prefill-0", signal.SIGKILL)
    asking.join(40)

    assert answers == [_right(830)]
    wait_until(
        lambda: any(one.node.name == "prefill-0" and one.node.start_id != life for one in fleet.nodes()), 30,
        fleet.what_is_wrong,
    )  # fmt: skip
    assert _counter(fleet, "host_blocks") == 0
    fleet.serve_on("prefill-0")
    asked = fleet_pb2.PreviewRequest(packed_ids=pack_ids(prompt(830, TOKENS)), max_tokens=8)
    wait_until(lambda: "from host memory" not in str(fleet.fleet.Preview(asked).way), 10)
    assert _answer(fleet, 830) == _right(830)
