"""Requirements of kvrelay.prefill_node.leases and of the merged counters."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.core.types import Incarnation
from kvrelay.prefill_node.leases import Leases
from kvrelay.prefill_node.stats import merged_counters

ROUTER, OTHER = Incarnation("router", 1), Incarnation("router", 2)


def some_leases() -> tuple[Leases, ManualClock, list[tuple[str, str]]]:
    clock, expired = ManualClock(), []
    leases = Leases(lease_s=5.0, on_expired=lambda key, reason: expired.append((key, reason)), clock=clock)
    return leases, clock, expired


def test_a_request_whose_holder_is_silent_ends_once() -> None:
    leases, clock, expired = some_leases()
    leases.open("a#1", request_id="a", holder=ROUTER)
    clock.advance(4.9)
    leases.check()
    assert expired == []

    clock.advance(0.2)
    leases.check()
    leases.check()

    assert [key for key, _ in expired] == ["a#1"]
    assert "router@" in expired[0][1]


def test_only_its_own_holder_keeps_a_request_alive() -> None:
    leases, clock, expired = some_leases()
    leases.open("a#1", request_id="a", holder=ROUTER)
    leases.open("b#1", request_id="b", holder=ROUTER)
    clock.advance(4.0)

    assert leases.renew(ROUTER, ["a", "c"]) == ["c"]
    assert leases.renew(OTHER, ["b"]) == ["b"]
    clock.advance(2.0)
    leases.check()

    assert [key for key, _ in expired] == ["b#1"]


def test_a_closed_request_does_not_expire() -> None:
    leases, clock, expired = some_leases()
    leases.open("a#1", request_id="a", holder=ROUTER)
    leases.close("a#1")
    leases.close("a#1")
    clock.advance(60.0)

    leases.check()

    assert expired == []


def test_counters_are_reported_per_rank_and_over_all_ranks() -> None:
    merged = merged_counters([{"chunks": 2.0, "held_max": 1.0}, {"chunks": 3.0, "held_max": 2.0}])

    assert merged == {
        "chunks": 5.0, "chunks_rank0": 2.0, "chunks_rank1": 3.0,
        "held_max": 2.0, "held_max_rank0": 1.0, "held_max_rank1": 2.0,
    }  # fmt: skip
