"""Rates and times between two answers of `Fleet.Traffic`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.proto.v1 import fleet_pb2


@dataclass(frozen=True, slots=True)
class Figures:
    """What happened between two looks; a time is None when nothing was measured."""

    requests_per_s: float
    failed_per_s: float
    tokens_per_s: float
    cached_share: float | None  # of the prompt tokens
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_p50_s: float | None
    tbt_p99_s: float | None


def between(before: fleet_pb2.TrafficReply, after: fleet_pb2.TrafficReply, *, elapsed_s: float) -> Figures:
    """Return the figures; a router that has restarted meanwhile counts from its start."""
    if before.router != after.router:
        before = fleet_pb2.TrafficReply()
    ended = {status: count - before.requests.get(status, 0) for status, count in after.requests.items()}
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    ttft, tbt = _since(before.ttft, after.ttft), _since(before.tbt, after.tbt)
    return Figures(
        requests_per_s=sum(ended.values()) / elapsed_s,
        failed_per_s=sum(count for status, count in ended.items() if status not in ("ok", "cancelled")) / elapsed_s,
        tokens_per_s=(after.output_tokens - before.output_tokens) / elapsed_s,
        cached_share=(after.cached_tokens - before.cached_tokens) / prompt_tokens if prompt_tokens else None,
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        tbt_p50_s=quantile(tbt, 0.5),
        tbt_p99_s=quantile(tbt, 0.99),
    )


def quantile(histogram: fleet_pb2.Histogram, share: float) -> float | None:
    """Return the value that `share` of the observations do not exceed, as if each bucket were filled evenly.

    Above the last finite bound nothing more is known than that bound.
    """
    wanted = share * sum(histogram.counts)
    if not wanted:
        return None
    seen, low_s = 0, 0.0
    for bound_s, count in zip(histogram.bounds_s, histogram.counts, strict=True):
        if seen + count >= wanted and count:
            return low_s if bound_s == float("inf") else low_s + (bound_s - low_s) * (wanted - seen) / count
        seen, low_s = seen + count, bound_s
    return low_s


def _since(before: fleet_pb2.Histogram, after: fleet_pb2.Histogram) -> fleet_pb2.Histogram:
    earlier = before.counts or [0] * len(after.counts)
    counts = [count - old for count, old in zip(after.counts, earlier, strict=True)]
    return fleet_pb2.Histogram(bounds_s=after.bounds_s, counts=counts)
