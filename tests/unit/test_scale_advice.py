"""Scale advice in simulation: nodes come when the load needs them, stay while it comes and goes, and leave after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.cli.advisor import Advice, Advisor, NodeLoad, Targets

TARGETS = Targets(prefill_tokens=1000, decode_sequences=10, up_s=15, down_s=300, warm_up_s=30)
LOOK_S = 2.0
START_S = 40.0  # from an advice to a node that serves


def simulate(
    demand: Callable[[float], tuple[float, float]], *, until_s: float, targets: Targets = TARGETS
) -> list[tuple[float, Advice]]:
    """Follow every advice; nodes come START_S after it. Return each change of advice with its time.

    Args:
        demand: (prompt tokens, sequences) in the fleet at a time.
    """
    advisor, changes = Advisor(targets), list[tuple[float, Advice]]()
    since: dict[str, list[float]] = {"prefill": [0.0], "decode": [0.0]}  # when each node began to serve
    now_s = 0.0
    while now_s < until_s:
        nodes = []
        for role, work in zip(since, demand(now_s), strict=True):
            serving = [at_s for at_s in since[role] if at_s <= now_s]
            nodes += [NodeLoad(f"{role}-{at_s}-{n}", role, 1, work / len(serving)) for n, at_s in enumerate(serving)]
        advice = advisor.observe(now_s, nodes)
        if not changes or changes[-1][1] != advice:
            changes.append((now_s, advice))
        for role, count in (("prefill", advice.prefill), ("decode", advice.decode)):
            del since[role][count:]
            since[role] += [now_s + START_S] * (count - len(since[role]))
        now_s += LOOK_S
    return changes


def test_a_square_wave_does_not_make_the_advice_oscillate() -> None:
    changes = simulate(lambda now_s: (0.0, 45.0 if now_s % 120 < 60 else 3.0), until_s=3600)

    counts = [advice.decode for _, advice in changes]
    assert counts == sorted(counts)  # it only ever grew
    assert counts[-1] == 5
    assert changes[-1][0] < 120


def test_a_square_wave_on_both_pools_keeps_both() -> None:
    changes = simulate(lambda now_s: (3500.0, 2.0) if now_s % 200 < 100 else (100.0, 38.0), until_s=3600)

    assert (changes[-1][1].prefill, changes[-1][1].decode) == (4, 4)
    assert changes[-1][0] < 400


def test_a_load_that_has_ended_gives_its_nodes_back_once() -> None:
    changes = simulate(lambda now_s: (0.0, 45.0 if now_s < 600 else 3.0), until_s=3600)

    counts = [advice.decode for _, advice in changes]
    assert counts == sorted(counts[: counts.index(5)]) + sorted(counts[counts.index(5) :], reverse=True)
    assert counts[-1] == 1
    assert 900 <= changes[-1][0] <= 960  # not before the load had been low for down_s
    assert all(at_s < 60 or at_s >= 900 for at_s, _ in changes)


def test_a_peak_shorter_than_the_window_adds_nothing() -> None:
    changes = simulate(lambda now_s: (0.0, 20.0 if 100 <= now_s < 102 else 8.0), until_s=600)

    assert {advice.decode for _, advice in changes} == {1}


def test_nodes_that_just_came_are_not_sent_away_for_being_idle() -> None:
    advisor = Advisor(Targets(decode_sequences=10, up_s=1, down_s=10, warm_up_s=1000))
    loads = [NodeLoad(f"decode-{n}", "decode", 1, 0.0) for n in range(4)]

    advised = [advisor.observe(at_s, loads).decode for at_s in range(200)]

    assert set(advised) == {4}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(0, Advice(4, 5)), (13, Advice(4, 5)), (9, Advice(2, 5, short_of_devices=True)), (3, Advice(1, 1, True))],
)
def test_the_device_budget_cuts_prefill_first(devices: int, expected: Advice) -> None:
    advisor = Advisor(Targets(prefill_tokens=1000, decode_sequences=10, devices=devices))
    nodes = [NodeLoad("p", "prefill", 2, 4000), NodeLoad("d", "decode", 1, 50)]

    assert advisor.observe(0.0, nodes) == expected
