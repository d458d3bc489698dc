"""A decode node as a process: how it starts, idles and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from decode_lab import CPU, PrefillSide
from idle import Waiting, assert_idle
from kvrelay.core.types import Incarnation, Sampling
from kvrelay.index.server import EmbeddedServer
from kvrelay.model.checkpoint import load_model
from kvrelay.proto.convert import incarnation_to_pb, pack_ids
from kvrelay.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, handoff_pb2
from oracle_data import oracle_folder, recording

ORACLE = "v2_lite_greedy"
NOBODY = Incarnation("prefill", 1)


@dataclass
class Node:
    process: subprocess.Popen[str]
    endpoint: str
    stub: decode_pb2_grpc.DecodeNodeStub

    def reserve(self, *, prompt: Sequence[int] = (1, 2, 3), writer: Incarnation = NOBODY) -> handoff_pb2.Ticket:
        """Reserve pages for a request of 24 tokens."""
        record = self.stub.Stats(common_pb2.StatsRequest())
        asked = decode_pb2.ReserveRequest(
            request=common_pb2.RequestRef(request_id="r", attempt=1),
            holder=incarnation_to_pb(Incarnation.new("router")),
            node=record.node,
            writer=incarnation_to_pb(writer),
            ring_size=1,
            packed_ids=pack_ids(prompt),
            sampling=common_pb2.Sampling(max_tokens=24),
            layout_fingerprint=self.fingerprint(),
            timeout_ms=20_000,
        )
        return self.stub.Reserve(asked).ticket

    def decode(self, ticket: handoff_pb2.Ticket) -> list[int]:
        """Return the tokens of the request's stream."""
        call = self.stub.Decode(decode_pb2.DecodeRequest(request=ticket.request, epoch=ticket.epoch))
        return [token.token_id for event in call for token in event.tokens.tokens]

    def said(self) -> str:
        """Return what an ended process logged."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def fingerprint(self) -> bytes:
        """Return the node's layout, from its own refusal of another one."""
        with pytest.raises(grpc.RpcError) as caught:
            self.stub.Reserve(
                decode_pb2.ReserveRequest(
                    node=self.stub.Stats(common_pb2.StatsRequest()).node,
                    layout_fingerprint=b"x",
                    request=common_pb2.RequestRef(request_id="who", attempt=1),
                )
            )
        return bytes.fromhex((caught.value.details() or "").split()[-1])


def start(*options: str, program: Sequence[str] = ("-m", "kvrelay.cli.main", "decode")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture
def node() -> Iterator[Node]:
    with running() as made:
        yield made


@contextmanager
def running(**start_options: Any) -> Iterator[Node]:
    index = EmbeddedServer.start()
    process = start(
        "--model", str(oracle_folder(ORACLE)), "--name", "decode-0", "--index-url", index.url,
        "--pool-pages", "50", "--lease-s", "2", **start_options,
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
    request = node.reserve().request
    node.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        node.process.wait(0.5)
    node.stub.Abort(common_pb2.AbortRequest(request=request))
    assert node.process.wait(20) == 0


def test_a_drain_by_rpc_ends_the_process(node: Node) -> None:
    assert node.stub.Drain(common_pb2.DrainRequest()).active_requests == 0
    assert node.process.wait(20) == 0


def test_a_drain_does_not_wait_for_ever_for_a_silent_holder(node: Node) -> None:
    node.reserve()
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(20) == 0


def test_a_second_stop_signal_ends_the_process_at_once(node: Node) -> None:
    node.reserve()
    node.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(20) == 1


@pytest.fixture
def prefill() -> Iterator[PrefillSide]:
    side = PrefillSide.start(load_model(oracle_folder(ORACLE), dtype="float32", device=CPU, max_model_len=2048))
    yield side
    side.stop()


async def answered(node: Node, prefill: PrefillSide) -> list[int]:
    """Return the tokens of a whole request whose latents come from this process."""
    prompt, sampling = recording(ORACLE, 333).prompt, Sampling(max_tokens=24)
    session, first = prefill.prefill(prompt, sampling)
    ticket = await asyncio.to_thread(node.reserve, prompt=prompt, writer=prefill.incarnation)
    decoding = asyncio.create_task(asyncio.to_thread(node.decode, ticket))
    await prefill.hand_over(ticket, session, first)
    return [first.token_id, *await decoding]


async def test_latents_from_another_process_give_the_recorded_tokens(node: Node, prefill: PrefillSide) -> None:
    assert await answered(node, prefill) == recording(ORACLE, 333).greedy


async def test_a_node_that_has_served_uses_less_than_two_percent_of_a_core(node: Node, prefill: PrefillSide) -> None:
    await answered(node, prefill)  # its transfer and step threads have had work
    await asyncio.sleep(1.0)
    await asyncio.to_thread(assert_idle, {"decode-0": Waiting([node.process.pid], 0.02)})


_WITH_A_BUG = """
import sys
from kvrelay.cli import node_process
from kvrelay.decode_node import engine
step = engine.DecodeEngine.step
def broken(self, batch, states, **how):
    if batch[0].position > 340:
        raise ZeroDivisionError("a bug")
    return step(self, batch, states, **how)
engine.DecodeEngine.step = broken
node_process.decode(sys.argv[1:])
"""


async def test_a_bug_in_a_step_is_told_to_the_request_and_ends_the_process(prefill: PrefillSide) -> None:
    with running(program=("-c", _WITH_A_BUG)) as node:
        with pytest.raises(grpc.RpcError) as caught:
            await answered(node, prefill)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "a bug" in (caught.value.details() or "")
        assert await asyncio.to_thread(node.process.wait, 5) == 1
        assert "Traceback" in node.said()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--model", "/no/such/folder"), "/no/such/folder"),
        pytest.param((), "--model is required", marks=pytest.mark.full),
        pytest.param(("--model", "m", "--no-such-option", "1"), "--no-such-option", marks=pytest.mark.full),
    ],
)
def test_a_wrong_start_is_one_line_and_status_1(options: tuple[str, ...], text: str) -> None:
    process = start(*options)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert text in said.splitlines()[-1]
    assert "Traceback" not in said
