"""How well the router's copy of the prefix index follows, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvrelay.index.mirror import IndexMirror

_COUNTS = {
    "changes": "Changes of the index that the mirror has taken in",
    "snapshots": "Holders that the mirror has read as a whole",
    "gaps": "Times that the mirror had missed changes",
}


class MirrorMetrics:
    """Computed when scraped."""

    def __init__(self, mirror: IndexMirror) -> None:
        self._mirror = mirror

    def collect(self) -> Iterator[Metric]:
        mirror = self._mirror
        yield GaugeMetricFamily(
            "kvrelay_index_mirror_exact", "1 while the router's copy of the index is exact", value=int(mirror.is_exact)
        )
        yield GaugeMetricFamily(
            "kvrelay_index_mirror_blocks", "Blocks in the router's copy of the index", value=mirror.num_blocks
        )
        yield GaugeMetricFamily(
            "kvrelay_index_mirror_silent_seconds", "Since the index server was last heard of", value=mirror.silent_s
        )
        counts = mirror.counters.values
        for name, text in _COUNTS.items():
            value = counts.get(f"index_mirror_{name}", 0.0)
            yield CounterMetricFamily(f"kvrelay_index_mirror_{name}", text, value=value)
