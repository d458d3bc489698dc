"""Traces: what a header says, what spans report, and what of it reaches the log and OpenTelemetry."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrelay.core import logs, otel, tracing
from kvrelay.core.errors import SettingsError

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("header", [HEADER, HEADER[:-2] + "00"])
def test_a_header_comes_out_as_it_came_in(header: str) -> None:
    trace = tracing.Trace.parse(header)
    assert trace is not None
    assert trace.header == header


@pytest.mark.parametrize(
    "header",
    ["", "00-1-2-01", HEADER.upper(), "ff" + HEADER[2:], HEADER + "-x", f"00-{'0' * 32}-b7ad6b7169203331-01",
     f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"],
)  # fmt: skip
def test_a_header_that_is_not_valid_is_not_followed(header: str) -> None:
    assert tracing.Trace.parse(header) is None
    assert tracing.incoming([("traceparent", header)]) is None


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter, log = InMemorySpanExporter(), logging.getLogger(tracing.LOGGER)
    handler, level = otel.SpanHandler(SimpleSpanProcessor(exporter), service="here"), log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield exporter
    log.removeHandler(handler)
    log.setLevel(level)
    handler.close()


def test_nested_spans_reach_opentelemetry_joined(exported: InMemorySpanExporter) -> None:
    caller = tracing.Trace.parse(HEADER)
    with tracing.span("outer", of="r1", parent=caller):
        carried = tracing.incoming(tracing.outgoing())
        with tracing.span("inner", of="r1", parent=carried):
            pass

    inner, outer = exported.get_finished_spans()
    assert inner.parent is not None
    assert outer.parent is not None
    assert (inner.parent.span_id, outer.parent.span_id) == (outer.context.span_id, int("b7ad6b7169203331", 16))
    assert {one.context.trace_id for one in (inner, outer)} == {int("0af7651916cd43dd8448eb211c80319c", 16)}
    assert dict(inner.attributes or {}) == {"kvrelay.request_id": "r1"}
    assert (inner.end_time or 0) >= (inner.start_time or 0)


def test_a_failed_span_says_so_and_one_that_is_not_sampled_says_nothing(exported: InMemorySpanExporter) -> None:
    unsampled = tracing.Trace.parse(HEADER[:-2] + "00")
    for parent in (unsampled, None):
        with pytest.raises(KeyError), tracing.span("bad", of="r2", parent=parent):
            raise KeyError("x")

    (bad,) = exported.get_finished_spans()
    assert bad.status.description == "KeyError"
    assert bad.parent is None


def test_an_exporter_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="no span exporter 'nowhere' is installed"):
        otel.export("nowhere", service="here")


def test_a_json_line_carries_the_request_and_its_trace() -> None:
    form = logs.formatter("json")
    record = logging.LogRecord("some.where", logging.WARNING, "f", 1, "it is %s\nbroken", ("so",), None)
    with tracing.span("outer", of="r3", parent=tracing.Trace.parse(HEADER)):
        line = form.format(record)
    outside = json.loads(form.format(record))

    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("warning", "some.where", "it is so\nbroken")
    assert (told["request_id"], told["trace_id"]) == ("r3", "0af7651916cd43dd8448eb211c80319c")
    assert not {"request_id", "trace_id"} & outside.keys()
