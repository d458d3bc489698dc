"""One request through real processes: every hop's span and log line names it, and they are one trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cluster.cluster import Cluster, a_request, wait_until
from cluster.specs import EVERY_LINE_LOGGED

CALLER = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
SPEC = EVERY_LINE_LOGGED


def lines_of(cluster: Cluster) -> list[dict[str, Any]]:
    found = re.search(r"logs in (\S+)", cluster.local.said())
    assert found is not None
    files = [
        path for path in Path(found[1]).glob("*.log") if path.stem.split("-")[0] in ("router", "prefill", "decode")
    ]
    return [json.loads(line) for path in files for line in path.read_text().splitlines() if line.startswith("{")]


def test_the_spans_of_both_legs_hang_below_the_callers(cluster: Cluster) -> None:
    call = cluster.inference.Generate(
        a_request([5, 6, 7], max_tokens=4, ignore_eos=True),
        timeout=30,
        metadata=(("traceparent", f"00-{CALLER[0]}-{CALLER[1]}-01"),),
    )
    (request_id,) = [event.accepted.request_id for event in call if event.WhichOneof("event") == "accepted"]

    def spans() -> dict[str, dict[str, Any]]:
        return {
            line["span"]: line for line in lines_of(cluster) if line.get("request_id") == request_id and "span" in line
        }

    wait_until(lambda: set(spans()) == {"generate", "reserve", "prefill", "decode"}, 30, lambda: str(spans()))
    seen = spans()
    assert {line["trace_id"] for line in seen.values()} == {CALLER[0]}
    assert seen["generate"]["parent_id"] == CALLER[1]
    assert {seen[leg]["parent_id"] for leg in ("reserve", "prefill", "decode")} == {seen["generate"]["span_id"]}
    assert len({line["process"] for line in seen.values()}) == 3
    assert all(line["took_ms"] > 0 for line in seen.values())


def test_every_line_that_names_a_request_carries_its_id(cluster: Cluster) -> None:
    """Also those of a request that ends early: whoever searches for its id finds all that was said of it."""
    answered = cluster.generate([8, 9, 10], max_tokens=4, ignore_eos=True).accepted.request_id
    call = cluster.inference.Generate(a_request([11, 12, 13], max_tokens=1500, ignore_eos=True), timeout=30)
    given_up = next(event.accepted.request_id for event in call if event.WhichOneof("event") == "accepted")
    next(event for event in call if event.WhichOneof("event") == "tokens")  # all three have it now
    call.cancel()

    def of(request_id: str) -> list[dict[str, Any]]:
        return [line for line in lines_of(cluster) if request_id in json.dumps(line)]

    def told_by(request_id: str) -> set[int]:
        return {line["process"] for line in of(request_id) if "span" in line}

    for request_id in (answered, given_up):
        wait_until(lambda request_id=request_id: len(told_by(request_id)) == 3, 30)
        lost = [line for line in of(request_id) if line.get("request_id") != request_id]
        assert not lost, lost
