"""`kvrelay health`: whether a server answers requests now, by the standard gRPC health service; made for probes."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.cli import client
from kvrelay.cli.identity import Identity


def run(options: argparse.Namespace) -> int:
    """Return 0 when the server says SERVING; otherwise print why not on stderr and return 1."""
    try:
        with client.connect(options.endpoint, Identity.of(options)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(service=options.service), timeout=options.timeout_s)
    except grpc.RpcError as err:
        status, text = client.error_of(err)
        print(f"{status}: {text}", file=sys.stderr)
        return 1
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return 0
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status), file=sys.stderr)
    return 1
