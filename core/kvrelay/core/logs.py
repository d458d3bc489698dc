"""How a process writes its log: lines for people, or one JSON object per event."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from kvrelay.core import tracing

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname).1s %(process)d %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One line per event: time, level, process, logger, message; request_id and trace_id where there is a request."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        done = getattr(record, "span", None)
        if isinstance(done, tracing.Span):
            fields |= _of_span(done)
        else:
            here = tracing.current.get()
            fields |= {"request_id": tracing.request_id.get(), "trace_id": here.trace_id if here else ""}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value != ""}, ensure_ascii=False)


def formatter(log_format: LogFormat) -> logging.Formatter:
    return JsonFormatter() if log_format == "json" else logging.Formatter(TEXT)


def _of_span(done: tracing.Span) -> dict[str, object]:
    return {
        "request_id": done.request_id,
        "trace_id": done.at.trace_id,
        "span_id": done.at.span_id,
        "parent_id": done.parent.span_id if done.parent else "",
        "span": done.name,
        "took_ms": round((done.ended_ns - done.began_ns) / 1e6, 3),
        "error": done.error,
    }
