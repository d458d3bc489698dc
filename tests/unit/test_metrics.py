"""Metrics: what routers and nodes report, and that alerts and dashboard use nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from kvrelay.core import telemetry
from kvrelay.core.errors import SettingsError
from kvrelay.core.types import LinkState, Role, Usage
from kvrelay.index.reader import Confidence
from kvrelay.proto.node_metrics import COUNTERS, NodeMetrics
from kvrelay.proto.v1 import common_pb2, fleet_pb2
from kvrelay.router.metrics import FIRST_PARTS, SECOND_PARTS, RouterMetrics
from kvrelay.router.timesplit import TimeSplit
from repo import ROOT

ALERTS = ROOT / "compose" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "compose" / "grafana" / "dashboards" / "kvrelay.json"
TIME = TimeSplit(
    1, 2, 3, 4, 50, 5, 6, 7, 8, 9, ttft_ms=65, second_token_ms=95, total_ms=200, compute_ms=40, decode_step_ms=6
)
STATS = common_pb2.NodeStats(
    total_pages=10, free_pages=4, cached_pages=3, pinned_pages=2, quarantined_pages=1,
    sessions={"receiving": 2}, active_requests=5, queued_requests=1, counters=dict.fromkeys(COUNTERS, 7.0),
)  # fmt: skip


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def no_stats() -> common_pb2.NodeStats:
    raise AssertionError("not asked in these tests")


def a_router() -> RouterMetrics:
    metrics = RouterMetrics()
    records = [fleet_pb2.NodeRecord(role=fleet_pb2.NODE_ROLE_DECODE)]
    metrics.watch(records=lambda: records, num_active=lambda: 3)
    metrics.ended("ok")
    metrics.placed(Confidence.EXACT, way="local")
    metrics.refused("token")
    metrics.finished(TIME, Usage(100, 64, 0, 12))
    return metrics


def a_node(clock: Clock | None = None) -> NodeMetrics:
    links = {
        "decode-1": LinkState(2e9, "rc_mlx5/mlx5_0:1", is_expected=True),
        "decode-2": LinkState(0.0, "tcp/eth0", is_expected=False),
        "decode-3": LinkState(3e9, "", is_expected=True, age_s=901.0),
    }
    return NodeMetrics(Role.DECODE, no_stats, asyncio.new_event_loop(), links=lambda: links, clock=clock or Clock())


def value(metrics: Iterator[Metric], name: str, **labels: str) -> float:
    samples = [one for metric in metrics for one in metric.samples]
    return next(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


def peers_of(metrics: Iterator[Metric], name: str) -> set[str]:
    return {sample.labels["peer"] for metric in metrics for sample in metric.samples if sample.name == name}


def test_a_peer_is_named_for_as_long_as_it_is_written_to() -> None:
    assert value(a_node().of(STATS), "kvrelay_relay_bytes_per_second", peer="decode-1") == 2e9
    assert peers_of(a_node().of(STATS), "kvrelay_relay_bytes_per_second") == {"decode-1"}
    assert peers_of(a_node().of(STATS), "kvrelay_relay_route_expected") == {"decode-1", "decode-2"}


def test_a_route_is_named_and_says_whether_it_is_expected() -> None:
    seen = list(a_node().of(STATS))
    assert value(iter(seen), "kvrelay_relay_route_expected", peer="decode-1", route="rc_mlx5/mlx5_0:1") == 1
    assert value(iter(seen), "kvrelay_relay_route_expected", peer="decode-2", route="tcp/eth0") == 0


def existing() -> set[str]:
    """Return the names of all samples that routers and nodes report."""
    families = [*a_router().registry.collect(), *a_node().of(STATS)]
    return {sample.name for family in families for sample in family.samples}


def named_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkvrelay_\w+", expression))


def test_alerts_use_existing_metrics_only() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]

    assert rules
    for rule in rules:
        assert named_in(rule["expr"]), rule["alert"]
        assert named_in(rule["expr"]) <= existing(), rule["alert"]


def test_the_dashboard_uses_existing_metrics_only() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]

    assert panels
    for panel in panels:
        for target in panel["targets"]:
            assert named_in(target["expr"]), panel["title"]
            assert named_in(target["expr"]) <= existing(), panel["title"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian's package prometheus has it)")
@pytest.mark.parametrize("words", [("rules", ALERTS), ("config", ALERTS.parent / "prometheus.yml")])
def test_prometheus_itself_accepts_the_files(words: tuple[str, Path]) -> None:
    done = subprocess.run(
        ["promtool", "check", *map(str, words)], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here (Debian's package prometheus has it)")
def test_alerts_fire_on_what_they_are_for_and_are_silent_otherwise() -> None:
    rules = ROOT / "tests" / "unit" / "golden" / "alerts_test.yml"
    done = subprocess.run(
        ["promtool", "test", "rules", str(rules)], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_explained_in_the_operators_guide() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()

    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        assert all(rule["alert"] in guide for rule in group["rules"])


def test_the_parts_of_the_first_token_add_up() -> None:
    families = list(a_router().registry.collect())
    parts = sum(value(iter(families), "kvrelay_ttft_part_seconds_sum", part=part) for part in FIRST_PARTS)
    second = sum(value(iter(families), "kvrelay_second_token_part_seconds_sum", part=part) for part in SECOND_PARTS)

    assert parts == pytest.approx(value(iter(families), "kvrelay_ttft_seconds_sum"))
    assert second == pytest.approx((TIME.second_token_ms - TIME.ttft_ms) / 1000)


def test_tokens_that_come_together_share_their_time() -> None:
    clock = Clock()
    metrics = RouterMetrics(clock)
    pace = metrics.pace()
    for num_tokens, wait_s in ((1, 0.0), (1, 5.0), (4, 0.2)):
        clock.now_s += wait_s
        pace.tokens(num_tokens)

    assert value(iter(metrics.registry.collect()), "kvrelay_tbt_seconds_count") == 4  # the first two are not counted
    assert value(iter(metrics.registry.collect()), "kvrelay_tbt_seconds_sum") == pytest.approx(0.2)


def test_pages_are_reported_by_state() -> None:
    for state, number in (("free", 4), ("cached", 3), ("pinned", 2), ("quarantined", 1)):
        assert value(a_node().of(STATS), "kvrelay_pages", role="decode", state=state) == number


def test_the_age_of_a_quarantine_begins_anew_after_it_was_empty() -> None:
    clock = Clock()
    node, age = a_node(clock), "kvrelay_quarantine_age_seconds"
    assert value(node.of(STATS), age) == 0
    clock.now_s += 30
    assert value(node.of(STATS), age) == 30
    assert value(node.of(common_pb2.NodeStats()), age) == 0
    assert value(node.of(STATS), age) == 0


def test_no_metric_names_a_request_or_a_client() -> None:
    families = [*a_router().registry.collect(), *a_node().of(STATS)]
    labels = {label for family in families for sample in family.samples for label in sample.labels}

    known = {"role", "state", "part", "status", "confidence", "source", "reason", "le", "peer", "route", "way"}
    assert labels <= known


def test_an_endpoint_serves_the_registry() -> None:
    endpoint = telemetry.serve("127.0.0.1:0", a_router().registry)
    assert endpoint is not None
    with urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
        text = answer.read().decode()
    endpoint.stop()

    assert "kvrelay_ttft_seconds_bucket" in text
    assert text.startswith("# HELP")


def test_without_an_address_there_is_no_endpoint() -> None:
    assert telemetry.serve("", CollectorRegistry()) is None


def test_an_address_in_use_is_one_clear_error() -> None:
    endpoint = telemetry.serve("127.0.0.1:0", CollectorRegistry())
    assert endpoint is not None
    with pytest.raises(SettingsError, match=f"127.0.0.1:{endpoint.port}"):
        telemetry.serve(f"127.0.0.1:{endpoint.port}", CollectorRegistry())
    endpoint.stop()


async def test_a_node_is_asked_on_its_own_loop() -> None:
    async def stats() -> common_pb2.NodeStats:
        return STATS

    registry = CollectorRegistry()
    registry.register(NodeMetrics(Role.DECODE, stats, asyncio.get_running_loop()))

    text = (await asyncio.to_thread(generate_latest, registry)).decode()

    assert 'kvrelay_active_requests{role="decode"} 5.0' in text
