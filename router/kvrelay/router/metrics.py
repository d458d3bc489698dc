"""What a router measures of its requests, for Prometheus."""

from __future__ import annotations

import itertools
from collections import Counter as Count
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.telemetry import LONG_SECONDS, SHORT_SECONDS
from kvrelay.core.types import Usage
from kvrelay.index.reader import Confidence
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.timesplit import TimeSplit

FIRST_PARTS = ("queue", "tokenize", "place", "reserve", "prefill", "delivery")
SECOND_PARTS = ("exposed_relay", "verify", "admit", "first_step")
_ROLES = {fleet_pb2.NODE_ROLE_PREFILL: "prefill", fleet_pb2.NODE_ROLE_DECODE: "decode"}


class RouterMetrics:
    """One per router; owned by the event loop, read by the HTTP thread."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self._clock = clock
        self._requests = Counter("kvrelay_requests", "Requests by gRPC status", ["status"], registry=registry)
        self._placements = Counter(
            "kvrelay_placements", "Requests by how sure the prefix index was", ["confidence"], registry=registry
        )
        self._ways = Counter(
            "kvrelay_prompts", "Requests by how their prompt got to the decode node", ["way"], registry=registry
        )
        self._refusals = Counter(
            "kvrelay_refused_calls", "Calls that were not let in, by reason", ["reason"], registry=registry
        )
        self._prompt = Counter(
            "kvrelay_prompt_tokens", "Prompt tokens of finished requests, by where they came from", ["source"],
            registry=registry,
        )  # fmt: skip
        self._pulled = Counter(
            "kvrelay_pulled_tokens", "Prompt tokens that a prefill node fetched from another node", registry=registry
        )
        self._output = Counter("kvrelay_output_tokens", "Tokens sent in finished requests", registry=registry)
        self._ttft = Histogram(
            "kvrelay_ttft_seconds", "Time to the first token", buckets=LONG_SECONDS, registry=registry
        )
        self._ttft_parts = Histogram(
            "kvrelay_ttft_part_seconds", "Its parts; they add up to it", ["part"], buckets=LONG_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._second_parts = Histogram(
            "kvrelay_second_token_part_seconds", "Parts of the time from the first to the second token", ["part"],
            buckets=SHORT_SECONDS, registry=registry,
        )  # fmt: skip
        self._tbt = Histogram(
            "kvrelay_tbt_seconds", "Time between tokens after the second", buckets=SHORT_SECONDS, registry=registry
        )
        self._total = Histogram(
            "kvrelay_request_seconds", "Time of whole requests", buckets=LONG_SECONDS, registry=registry
        )

    def watch(self, *, records: Callable[[], list[fleet_pb2.NodeRecord]], num_active: Callable[[], int]) -> None:
        """Also report the fleet as this router sees it; both are called on the HTTP thread."""
        self.registry.register(_Fleet(records, num_active))

    def placed(self, confidence: Confidence, *, way: str) -> None:
        self._ways.labels(way).inc()
        self._placements.labels(confidence.name.lower()).inc()

    def ended(self, status: str) -> None:
        """Count a request by the name of its gRPC status."""
        self._requests.labels(status.lower()).inc()

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def finished(self, time: TimeSplit, usage: Usage, *, pulled_tokens: int = 0) -> None:
        """Take in the account of a request that did not fail; `pulled_tokens` are some of the cached ones."""
        self._prompt.labels("cached").inc(usage.cached_tokens)
        self._pulled.inc(pulled_tokens)
        self._prompt.labels("computed").inc(usage.prompt_tokens - usage.cached_tokens)
        self._output.inc(usage.completion_tokens)
        self._total.observe(time.total_ms / 1000)
        if not time.ttft_ms:
            return
        self._ttft.observe(time.ttft_ms / 1000)
        for part in FIRST_PARTS:
            self._ttft_parts.labels(part).observe(getattr(time, f"{part}_ms") / 1000)
        if time.second_token_ms:
            for part in SECOND_PARTS:
                self._second_parts.labels(part).observe(getattr(time, f"{part}_ms") / 1000)

    def traffic(self) -> fleet_pb2.TrafficReply:
        """Return the counts of `Fleet.Traffic`; who asks fills in the rest."""
        prompt = _by_label(self._prompt, "source")
        return fleet_pb2.TrafficReply(
            requests=_by_label(self._requests, "status"),
            output_tokens=int(_total(self._output)),
            prompt_tokens=sum(prompt.values()),
            cached_tokens=prompt.get("cached", 0),
            ttft=_histogram_to_pb(self._ttft),
            tbt=_histogram_to_pb(self._tbt),
            confidence=_by_label(self._placements, "confidence"),
        )

    def pace(self) -> Pace:
        """Return a stop watch for the tokens of one request."""
        return Pace(self._tbt, self._clock)


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    return {
        sample.labels[label]: int(sample.value)
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def _total(counter: Counter) -> float:
    return next(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total"))


def _histogram_to_pb(histogram: Histogram) -> fleet_pb2.Histogram:
    """Prometheus counts what is at most each bound; here each observation counts once."""
    upto = [
        (float(sample.labels["le"]), int(sample.value))
        for metric in histogram.collect()
        for sample in metric.samples
        if sample.name.endswith("_bucket")
    ]
    before = (0, *(count for _, count in upto))
    return fleet_pb2.Histogram(
        bounds_s=[bound for bound, _ in upto],
        counts=[count - earlier for (_, count), earlier in zip(upto, before, strict=False)],
    )


class Pace:
    """Measures the time between the tokens of one request; tokens that come together share it."""

    def __init__(self, tbt: Histogram, clock: Clock) -> None:
        self._tbt, self._clock = tbt, clock
        self._last_s = 0.0
        self._num_tokens = 0

    def tokens(self, num_tokens: int) -> None:
        now_s = self._clock()
        if self._num_tokens >= 2 and num_tokens:
            for _ in range(num_tokens):
                self._tbt.observe((now_s - self._last_s) / num_tokens)
        self._num_tokens += num_tokens
        self._last_s = now_s


class _Fleet:
    """Computed when scraped."""

    def __init__(self, records: Callable[[], list[fleet_pb2.NodeRecord]], num_active: Callable[[], int]) -> None:
        self._records, self._num_active = records, num_active

    def collect(self) -> Iterator[Metric]:
        active = GaugeMetricFamily("kvrelay_router_active_requests", "Requests in work at this router")
        active.add_metric([], self._num_active())
        yield active
        records = self._records()
        states = Count((_ROLES.get(one.role, "other"), "draining" if one.draining else "serving") for one in records)
        nodes = GaugeMetricFamily(
            "kvrelay_nodes", "Registered nodes as this router sees them", labels=["role", "state"]
        )
        for role, state in itertools.product(_ROLES.values(), ("serving", "draining")):
            nodes.add_metric([role, state], states[role, state])
        yield nodes
        queued = GaugeMetricFamily("kvrelay_queued_prompt_tokens", "Prompt tokens that wait or are in work")
        queued.add_metric([], sum(one.queued_tokens for one in records if one.role == fleet_pb2.NODE_ROLE_PREFILL))
        yield queued
