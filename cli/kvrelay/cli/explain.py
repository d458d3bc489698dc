"""`kvrelay explain`: why a request went where it went."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import grpc

from kvrelay.cli import client
from kvrelay.cli.identity import Identity
from kvrelay.proto.v1 import fleet_pb2, fleet_pb2_grpc

CALL_TIMEOUT_S = 10.0
_ROLE_PREFIX = "NODE_ROLE_"


def run(options: argparse.Namespace) -> int:
    """Print every node that was considered, what it would have cost, and why it was not chosen."""
    request = fleet_pb2.ExplainRequest(request_id=options.request)
    try:
        with client.connect(options.endpoint, Identity.of(options)) as channel:
            reply = fleet_pb2_grpc.FleetStub(channel).Explain(request, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as err:
        status, text = client.error_of(err)
        print(f"{status}: {text}", file=sys.stderr)
        return 1
    found = as_dict(reply)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{found['prompt_tokens']} prompt tokens, index {found['index_confidence']}")
    for one in found["candidates"]:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in one["parts_s"].items())
        where = f"{one['role']} {one['node']}"
        print(f"  {where:32} {one['cached_tokens']:>8} cached {one['total_s']:>9.3g} s ({parts}): {one['verdict']}")
    if found["way"]:
        print(f"  {found['way']}")
    for name, why in found["refused"].items():
        print(f"  {name}: left out: {why}")
    return 0


def as_dict(reply: fleet_pb2.ExplainReply) -> dict[str, Any]:
    """Return a decision as a JSON object."""
    role = fleet_pb2.Candidate.DESCRIPTOR.fields_by_name["role"]
    return {
        "prompt_tokens": reply.prompt_tokens,
        "index_confidence": reply.index_confidence,
        "candidates": [
            {
                "node": one.node,
                "role": client.pb_name(role, one.role, _ROLE_PREFIX),
                "ring_size": one.ring_size,
                "cached_tokens": one.cached_tokens,
                "total_s": one.total_s,
                "parts_s": dict(sorted(one.parts_s.items())),
                "verdict": one.verdict,
            }
            for one in reply.candidates
        ],
        "way": reply.way,
        "refused": dict(sorted(reply.refused.items())),
    }
