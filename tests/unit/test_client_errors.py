"""What the command line says when a call fails."""

from __future__ import annotations

import socket

import grpc
import pytest

from kvrelay.cli.client import error_of
from kvrelay.proto.v1 import inference_pb2, inference_pb2_grpc


def test_a_router_that_is_not_there_is_told_with_what_to_do() -> None:
    with socket.socket() as taken:  # bound and not listening: a port that refuses
        taken.bind(("127.0.0.1", 0))
        with grpc.insecure_channel(f"127.0.0.1:{taken.getsockname()[1]}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as failed:
                list(stub.Generate(inference_pb2.GenerateRequest(text="hi"), timeout=10))

    status, text = error_of(failed.value)

    assert status == "UNAVAILABLE"
    assert "kvrelay up" in text
