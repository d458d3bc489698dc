"""`kvrelay scale-advice`: watches a fleet's load and says how many nodes of each role it needs."""

from __future__ import annotations

import argparse
import json
import sys
import time

import grpc

from kvrelay.cli import client
from kvrelay.cli.advisor import Advice, Advisor, NodeLoad, Targets
from kvrelay.cli.identity import Identity
from kvrelay.core.clock import monotonic
from kvrelay.proto.convert import incarnation_from_pb
from kvrelay.proto.v1 import fleet_pb2, fleet_pb2_grpc

CALL_TIMEOUT_S = 10.0


def run(options: argparse.Namespace) -> int:
    """Print a JSON line when the advice changes, for as long as asked; without a time limit, until interrupted."""
    advisor = Advisor(
        Targets(
            prefill_tokens=options.prefill_tokens, decode_sequences=options.decode_sequences,
            devices=options.devices, down_s=options.down_s,
        )
    )  # fmt: skip
    until_s = monotonic() + options.watch_s if options.watch_s else float("inf")
    said: Advice | None = None
    with client.connect(options.endpoint, Identity.of(options)) as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        while True:
            try:
                records = stub.ListNodes(fleet_pb2.ListNodesRequest(), timeout=CALL_TIMEOUT_S).nodes
            except grpc.RpcError as err:
                print(": ".join(client.error_of(err)), file=sys.stderr)
                return 1
            nodes = [load_of(record) for record in records if not record.draining]
            advice = advisor.observe(monotonic(), nodes)
            if advice != said:
                said = advice
                print(json.dumps(as_dict(advice, nodes)), flush=True)
            if monotonic() + options.interval_s > until_s:
                return 0
            time.sleep(options.interval_s)


def load_of(record: fleet_pb2.NodeRecord) -> NodeLoad:
    """Return what the advisor needs of a node's record."""
    is_prefill = record.role == fleet_pb2.NODE_ROLE_PREFILL
    return NodeLoad(
        name=str(incarnation_from_pb(record.node)),
        role="prefill" if is_prefill else "decode",
        devices=record.ring_size,
        work=record.queued_tokens if is_prefill else record.active_requests,
    )


def as_dict(advice: Advice, nodes: list[NodeLoad]) -> dict[str, object]:
    """Return an advice beside what there is, as a JSON object."""
    return {
        "prefill": {"have": sum(node.role == "prefill" for node in nodes), "need": advice.prefill},
        "decode": {"have": sum(node.role == "decode" for node in nodes), "need": advice.decode},
        "short_of_devices": advice.short_of_devices,
    }
