"""Prometheus metrics of a process: one registry, one HTTP endpoint on a thread of its own.

Names are stable and carry their unit; labels take few values, so that a fleet's metrics stay small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Thread
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvrelay.core.errors import SettingsError

# From a chat's first token to the prefill of a million tokens.
LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Source(Protocol):
    """Computes metrics when it is asked; called on the thread of the HTTP server."""

    def collect(self) -> Iterable[Metric]: ...


class MetricsEndpoint:
    """Serves one registry over HTTP. Created by `serve`."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server, self._thread = server, thread

    @property
    def port(self) -> int:
        return self._server.server_port

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(listen: str, registry: CollectorRegistry) -> MetricsEndpoint | None:
    """Serve a registry on host:port, port 0 = any free one; nothing when `listen` is empty.

    Raises:
        SettingsError: the address cannot be bound.
    """
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), addr=host.strip("[]"), registry=registry)
    except OSError as err:
        raise SettingsError(f"cannot serve metrics on {listen}: {err.strerror or err}") from err
    return MetricsEndpoint(server, thread)


def gauge(name: str, text: str, values: Mapping[str, float], *, label: str = "", role: str) -> Metric:
    """Return a gauge of one role, with a value per value of `label` (or one value, under "")."""
    found = GaugeMetricFamily(name, text, labels=["role", label] if label else ["role"])
    for key, value in values.items():
        found.add_metric([role, key] if label else [role], value)
    return found


def counter(name: str, text: str, value: float, *, role: str) -> Metric:
    """Return a counter of one role; `name` ends in _total."""
    found = CounterMetricFamily(name, text, labels=["role"])
    found.add_metric([role], value)
    return found
