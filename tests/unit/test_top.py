"""`kvrelay top`: figures between two looks, and a view that fits a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvrelay.cli import top, traffic
from kvrelay.proto.v1 import common_pb2, fleet_pb2
from kvrelay.router.metrics import RouterMetrics

BOUNDS_S = (0.1, 0.2, 0.4, float("inf"))


def histogram(*counts: int) -> fleet_pb2.Histogram:
    return fleet_pb2.Histogram(bounds_s=BOUNDS_S, counts=counts)


def reply(start_id: int = 1, *, ok: int = 0, failed: int = 0, tokens: int = 0, ttft: int = 0) -> fleet_pb2.TrafficReply:
    return fleet_pb2.TrafficReply(
        router=common_pb2.Incarnation(name="router", start_id=start_id),
        requests={"ok": ok, "unavailable": failed},
        output_tokens=tokens,
        ttft=histogram(0, ttft, 0, 0),
        tbt=histogram(0, 0, 0, 0),
    )


@pytest.mark.parametrize(
    ("counts", "share", "expected_s"),
    [((10, 0, 0, 0), 0.5, 0.05), ((5, 5, 0, 0), 0.75, 0.15), ((0, 0, 4, 0), 1.0, 0.4), ((0, 0, 0, 3), 0.5, 0.4)],
)
def test_a_quantile_is_found_within_its_bucket(counts: tuple[int, ...], share: float, expected_s: float) -> None:
    assert traffic.quantile(histogram(*counts), share) == pytest.approx(expected_s)


def test_nothing_measured_is_no_time() -> None:
    assert traffic.quantile(histogram(0, 0, 0, 0), 0.5) is None


def test_figures_are_what_happened_in_between() -> None:
    figures = traffic.between(
        reply(ok=10, tokens=100, ttft=50), reply(ok=14, failed=2, tokens=300, ttft=54), elapsed_s=2.0
    )
    assert (figures.requests_per_s, figures.failed_per_s, figures.tokens_per_s) == (3.0, 1.0, 100.0)
    assert figures.ttft_p50_s == pytest.approx(0.15)
    assert figures.tbt_p50_s is None


def test_a_restarted_router_counts_from_its_start() -> None:
    assert traffic.between(reply(ok=100), reply(2, ok=6), elapsed_s=1.0).requests_per_s == 6.0


def test_the_router_counts_each_observation_once() -> None:
    metrics = RouterMetrics()
    for status in ("OK", "OK", "UNAVAILABLE"):
        metrics.ended(status)
    pace = metrics.pace()
    for _ in range(4):
        pace.tokens(1)
    counted = metrics.traffic()
    assert dict(counted.requests) == {"ok": 2, "unavailable": 1}
    assert sum(counted.tbt.counts) == 2  # between the second token and the fourth
    assert counted.tbt.bounds_s[-1] == float("inf")
    assert len(counted.tbt.counts) == len(counted.tbt.bounds_s)
    assert sum(counted.ttft.counts) == 0


def test_the_view_fits_80_columns_and_names_every_node() -> None:
    records = [
        fleet_pb2.NodeRecord(
            node=common_pb2.Incarnation(name=f"{name}-of-some-length", start_id=1), role=role, ring_size=1,
            total_pages=123456, free_pages=23456, active_requests=512, queued_tokens=1_000_000, draining=draining,
            links=[fleet_pb2.Link(peer="d", bytes_per_s=123.4e9)],
        )
        for name, role, draining in (
            ("prefill", fleet_pb2.NODE_ROLE_PREFILL, True),
            ("decode", fleet_pb2.NODE_ROLE_DECODE, False),
        )
    ]  # fmt: skip
    figures = traffic.between(reply(), reply(ok=123456, tokens=10**9, ttft=9), elapsed_s=1.0)
    out = io.StringIO()
    Console(file=out, width=top.WIDTH).print(top.frame(reply(), figures, records))
    lines = out.getvalue().splitlines()

    assert max(map(len, lines)) <= top.WIDTH
    rows = {line.split()[0]: line.split() for line in lines[4:]}
    assert len(rows) == 2
    assert [row[-1] for row in rows.values()] == ["draining", "serving"]
    assert all("100000/123456" in row for row in rows.values())
