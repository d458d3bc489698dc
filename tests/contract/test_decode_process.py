"""A decode node as a process: how it starts, idles and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import psutil
import pytest

from kvrelay.core.types import Incarnation
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto.convert import incarnation_to_pb, pack_ids
from kvrelay.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from oracle_data import oracle_folder

ORACLE = "v2_lite_greedy"


@dataclass
class Node:
    process: subprocess.Popen[str]
    endpoint: str
    stub: decode_pb2_grpc.DecodeNodeStub

    def reserve(self, *, timeout_ms: int = 20_000) -> common_pb2.RequestRef:
        """Reserve pages for a request that nobody will prefill."""
        record = self.stub.Stats(common_pb2.StatsRequest())
        request = common_pb2.RequestRef(request_id="r", attempt=1)
        asked = decode_pb2.ReserveRequest(
            request=request,
            holder=incarnation_to_pb(Incarnation.new("router")),
            node=record.node,
            writer=incarnation_to_pb(Incarnation.new("prefill")),
            ring_size=1,
            packed_ids=pack_ids([1, 2, 3]),
            sampling=common_pb2.Sampling(max_tokens=4),
            layout_fingerprint=self.fingerprint(),
            timeout_ms=timeout_ms,
        )
        self.stub.Reserve(asked)
        return request

    def fingerprint(self) -> bytes:
        """Return the node's layout, from its own refusal of another one."""
        with pytest.raises(grpc.RpcError) as caught:
            self.stub.Reserve(
                decode_pb2.ReserveRequest(node=self.stub.Stats(common_pb2.StatsRequest()).node, layout_fingerprint=b"x")
            )
        return bytes.fromhex((caught.value.details() or "").split()[-1])


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvrelay.decode_node.app", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture
def node() -> Iterator[Node]:
    index = EmbeddedServer.start()
    process = start(
        "--model", str(oracle_folder(ORACLE)), "--name", "decode-0", "--index-url", index.url,
        "--pool-pages", "50", "--lease-s", "2",
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["event"], ready["node"]) == ("ready", "decode-0")
    with grpc.insecure_channel(ready["endpoint"]) as channel:
        yield Node(process, ready["endpoint"], decode_pb2_grpc.DecodeNodeStub(channel))
    process.kill()
    process.communicate()
    index.stop()


def test_a_stop_signal_drains_and_exits_with_status_0(node: Node) -> None:
    request = node.reserve()
    node.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        node.process.wait(0.5)
    node.stub.Abort(common_pb2.AbortRequest(request=request))
    assert node.process.wait(5) == 0


def test_a_drain_by_rpc_ends_the_process(node: Node) -> None:
    assert node.stub.Drain(common_pb2.DrainRequest()).active_requests == 0
    assert node.process.wait(5) == 0


def test_a_drain_does_not_wait_for_ever_for_a_silent_holder(node: Node) -> None:
    node.reserve()
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(6) == 0


def test_a_second_stop_signal_ends_the_process_at_once(node: Node) -> None:
    node.reserve()
    node.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(1) == 1


def test_an_idle_node_uses_less_than_two_percent_of_a_core(node: Node) -> None:
    process = psutil.Process(node.process.pid)
    time.sleep(1.0)  # what start-up left behind
    before = process.cpu_times()
    time.sleep(4.0)
    after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    assert used_s / 4.0 < 0.02


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--model", "/no/such/folder"), "/no/such/folder"),
        ((), "model is required"),
        (("--model", "m", "--no-such-option", "1"), "--no-such-option"),
    ],
)
def test_a_wrong_start_is_one_line_and_status_1(options: tuple[str, ...], text: str) -> None:
    process = start(*options)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert text in said.splitlines()[-1]
    assert "Traceback" not in said
