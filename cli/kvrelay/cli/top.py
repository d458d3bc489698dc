"""`kvrelay top`: what runs where and how fast, again and again, within 80 columns."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cli import client, traffic
from kvrelay.cli.identity import Identity
from kvrelay.core.clock import monotonic
from kvrelay.proto.v1 import fleet_pb2, fleet_pb2_grpc

CALL_TIMEOUT_S = 10.0
WIDTH = 80
_NAME_WIDTH = 20
_ROLES = {fleet_pb2.NODE_ROLE_PREFILL: "prefill", fleet_pb2.NODE_ROLE_DECODE: "decode"}


def run(options: argparse.Namespace) -> int:
    """Show tables until interrupted, or `--frames` of them; a router that does not answer is status 1."""
    console = Console()
    try:
        with client.connect(options.endpoint, Identity.of(options)) as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            if console.is_terminal:
                with Live(console=console, auto_refresh=False, screen=False) as live:
                    _watch(stub, options, lambda table: live.update(table, refresh=True))
            else:
                _watch(stub, options, lambda table: console.print(table, width=WIDTH))
    except grpc.RpcError as err:
        print(": ".join(client.error_of(err)), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _watch(stub: fleet_pb2_grpc.FleetStub, options: argparse.Namespace, show: Callable[[RenderableType], None]) -> None:
    before, before_s = stub.Traffic(fleet_pb2.TrafficRequest(), timeout=CALL_TIMEOUT_S), monotonic()
    shown = 0
    while options.frames is None or shown < options.frames:
        time.sleep(options.interval_s)
        records = stub.ListNodes(fleet_pb2.ListNodesRequest(), timeout=CALL_TIMEOUT_S).nodes
        after, after_s = stub.Traffic(fleet_pb2.TrafficRequest(), timeout=CALL_TIMEOUT_S), monotonic()
        figures = traffic.between(before, after, elapsed_s=after_s - before_s)
        show(frame(after, figures, records))
        before, before_s, shown = after, after_s, shown + 1


def frame(
    reply: fleet_pb2.TrafficReply, figures: traffic.Figures, records: Sequence[fleet_pb2.NodeRecord]
) -> RenderableType:
    """Return one view: the router's figures, then a row per node."""
    sure = sum(reply.confidence.values())
    exact = _share(reply.confidence.get("exact", 0) / sure if sure else None)
    ttft, tbt = (figures.ttft_p50_s, figures.ttft_p99_s), (figures.tbt_p50_s, figures.tbt_p99_s)
    rate = f"{figures.requests_per_s:.1f} ended/s ({figures.failed_per_s:.1f} failed)"
    head = (
        f"{reply.router.name}: {reply.active_requests} in work, {rate}, {figures.tokens_per_s:.0f} tokens/s",
        f"TTFT p50 {_seconds(ttft[0])} p99 {_seconds(ttft[1])}   TBT p50 {_seconds(tbt[0])} p99 {_seconds(tbt[1])}",
        f"prompt cached {_share(figures.cached_share)}   index exact {exact} of {sure} placements",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("node", "role", "ring", "active", "queued", "pages used", "GB/s", "state"):
        right = title in ("ring", "active", "queued", "pages used", "GB/s")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for one in sorted(records, key=lambda one: (one.role, one.node.name)):
        used = one.total_pages - one.free_pages
        gb_per_s = sum(link.bytes_per_s for link in one.links) / 1e9
        table.add_row(
            _cut(one.node.name), _ROLES.get(one.role, "other"), str(one.ring_size), str(one.active_requests),
            str(one.queued_tokens), f"{used}/{one.total_pages}", f"{gb_per_s:.2f}" if one.links else "-",
            "draining" if one.draining else "serving",
        )  # fmt: skip
    return Group(*(Text(line, overflow="ellipsis", no_wrap=True) for line in head), table)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
