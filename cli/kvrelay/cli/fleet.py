"""`kvrelay nodes`, `drain`, `role` and `fence`: what runs where, and taking a node out or to the other role."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from kvrelay.cli import client
from kvrelay.cli.identity import Identity
from kvrelay.proto.v1 import fleet_pb2, fleet_pb2_grpc

CALL_TIMEOUT_S = 10.0
_ROLE_PREFIX = "NODE_ROLE_"
_ROLES = {"prefill": fleet_pb2.NODE_ROLE_PREFILL, "decode": fleet_pb2.NODE_ROLE_DECODE}
_TABLE_WIDTH = 1000  # more than any row has


def run_nodes(options: argparse.Namespace) -> int:
    """Print the nodes that the router knows."""
    try:
        with client.connect(options.endpoint, Identity.of(options)) as channel:
            reply = fleet_pb2_grpc.FleetStub(channel).ListNodes(fleet_pb2.ListNodesRequest(), timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as err:
        return _failed(err)
    nodes = [as_dict(record) for record in reply.nodes]
    if options.json:
        for node in nodes:
            print(json.dumps(node))
    else:
        _print_table(nodes)
    return 0


def run_drain(options: argparse.Namespace) -> int:
    """Ask the router to drain one node; returns at once, the node exits when its work is done."""
    return _drain(options, fleet_pb2.DrainNodeRequest(name=options.node), "is draining")


def run_role(options: argparse.Namespace) -> int:
    """Ask the router to give one node the other role; returns at once, the node takes it when its work is done."""
    request = fleet_pb2.DrainNodeRequest(name=options.node, next_role=_ROLES[options.role])
    return _drain(options, request, f"is draining to become a {options.role} node")


def _drain(options: argparse.Namespace, request: fleet_pb2.DrainNodeRequest, what: str) -> int:
    try:
        with client.connect(options.endpoint, Identity.of(options)) as channel:
            reply = fleet_pb2_grpc.FleetStub(channel).DrainNode(request, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as err:
        return _failed(err)
    print(f"{options.node} {what}, {reply.active_requests} requests to finish")
    if reply.missing:
        print(f"afterwards {reply.missing}: every request ends as UNAVAILABLE until that changes", file=sys.stderr)
    return 0


def run_fence(options: argparse.Namespace) -> int:
    """Tell the nodes that it may write into that a node is dead; exit code 1 when one of them could not be told."""
    request = fleet_pb2.FenceNodeRequest(name=options.node, start_id=options.start_id)
    try:
        with client.connect(options.endpoint, Identity.of(options)) as channel:
            reply = fleet_pb2_grpc.FleetStub(channel).FenceNode(request, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as err:
        return _failed(err)
    fenced = f"{options.node} is" if options.start_id else f"lives of {options.node} that are not registered are"
    print(f"{fenced} fenced on {', '.join(sorted(reply.told)) or 'no node'}: {reply.pages} pages come back")
    if reply.unreached:
        print(f"not reached: {', '.join(sorted(reply.unreached))}", file=sys.stderr)
    return 1 if reply.unreached else 0


def as_dict(record: fleet_pb2.NodeRecord) -> dict[str, Any]:
    """Return a registry record as a JSON object."""
    role = client.pb_name(record.DESCRIPTOR.fields_by_name["role"], record.role, _ROLE_PREFIX)
    return {
        "name": record.node.name,
        "start_id": f"{record.node.start_id:016x}",
        "role": role,
        "endpoint": record.endpoint,
        "ring_size": record.ring_size,
        "model": record.model,
        "dtype": record.dtype,
        "latent_format": record.latent_format,
        "max_model_len": record.max_model_len,
        "total_pages": record.total_pages,
        "free_pages": record.free_pages,
        "active_requests": record.active_requests,
        "queued_tokens": record.queued_tokens,
        "draining": record.draining,
        "layout": record.layout_fingerprint.hex(),
        "cost": {field.name: value for field, value in record.cost.ListFields()},
        "links_gb_per_s": {link.peer: round(link.bytes_per_s / 1e9, 3) for link in record.links},
        "links_over": {link.peer: link.route for link in record.links},
        "links_unexpected": [link.peer for link in record.links if link.is_unexpected],
    }


def _print_table(nodes: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - not needed for --json
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    titles = (
        "node", "role", "ring", "endpoint", "model", "dtype", "latents", "pages free", "active", "state", "relays over",
    )  # fmt: skip
    for title in titles:
        right = title in ("ring", "pages free", "active")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for node in sorted(nodes, key=lambda one: (one["role"], one["name"])):
        table.add_row(
            node["name"], node["role"], str(node["ring_size"]), node["endpoint"], node["model"], node["dtype"],
            node["latent_format"], f"{node['free_pages']}/{node['total_pages']}", str(node["active_requests"]),
            "draining" if node["draining"] else "serving", _relays_over(node),
        )  # fmt: skip
    # A row that is too wide for a terminal goes on in its next line; a name cut short could not be typed in.
    Console(width=_TABLE_WIDTH).print(table)


def _relays_over(node: dict[str, Any]) -> str:
    """Return the routes of a node's links; ! marks one that is not expected."""
    unexpected = {node["links_over"][peer] for peer in node["links_unexpected"]}
    routes = sorted(set(node["links_over"].values()) - {""})
    return ", ".join(f"{route} !" if route in unexpected else route for route in routes)


def _failed(err: grpc.RpcError) -> int:
    status, text = client.error_of(err)
    print(f"{status}: {text}", file=sys.stderr)
    return 1
