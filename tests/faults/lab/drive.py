"""The test in the place of a router: what it may ask of nodes directly, one request at a time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster.cluster import CALL_S, Cluster, status_of
from kvrelay.proto.convert import pack_ids
from kvrelay.proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    fleet_pb2,
    handoff_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)

ME = common_pb2.Incarnation(name="router-of-the-test", start_id=1)


@dataclass(slots=True)
class Drive:
    """One request between a prefill and a decode node. Created by `drive`."""

    prefill_node: fleet_pb2.NodeRecord
    decode_node: fleet_pb2.NodeRecord
    prefill: prefill_pb2_grpc.PrefillNodeStub
    decode: decode_pb2_grpc.DecodeNodeStub
    tokens: Sequence[int]
    max_tokens: int = 8
    ref: common_pb2.RequestRef = field(
        default_factory=lambda: common_pb2.RequestRef(request_id=secrets.token_hex(8), attempt=1)
    )
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def sampling(self) -> common_pb2.Sampling:
        return common_pb2.Sampling(max_tokens=self.max_tokens)

    def reserve(self, **changed: Any) -> handoff_pb2.Ticket:
        asked = decode_pb2.ReserveRequest(
            request=self.ref,
            holder=ME,
            node=self.decode_node.node,
            writer=self.prefill_node.node,
            ring_size=self.prefill_node.ring_size,
            packed_ids=pack_ids(list(self.tokens)),
            sampling=self.sampling(),
            layout_fingerprint=self.decode_node.layout_fingerprint,
            prefix_seed=self.seed,
            timeout_ms=30_000,
        )
        asked.MergeFrom(decode_pb2.ReserveRequest(**changed))
        return self.decode.Reserve(asked, timeout=CALL_S).ticket

    def start_prefill(self, ticket: handoff_pb2.Ticket, **changed: Any) -> Any:
        asked = prefill_pb2.PrefillRequest(
            request=self.ref,
            holder=ME,
            node=self.prefill_node.node,
            packed_ids=pack_ids(list(self.tokens)),
            sampling=self.sampling(),
            ticket=ticket,
            prefix_seed=self.seed,
        )
        asked.MergeFrom(prefill_pb2.PrefillRequest(**changed))
        return self.prefill.Prefill(asked, timeout=30)

    def renew(self) -> None:
        request = common_pb2.RenewRequest(holder=ME, request_ids=[self.ref.request_id])
        self.prefill.Renew(request, timeout=CALL_S)
        self.decode.Renew(request, timeout=CALL_S)

    def abort(self, stub: Any) -> bool:
        reply = stub.Abort(common_pb2.AbortRequest(request=self.ref, reason="by the test"), timeout=CALL_S)
        return bool(reply.was_active)

    def decode_stats(self) -> common_pb2.NodeStats:
        return self.decode.Stats(common_pb2.StatsRequest(), timeout=CALL_S)

    def prefill_stats(self) -> common_pb2.NodeStats:
        return self.prefill.Stats(common_pb2.StatsRequest(), timeout=CALL_S)


@contextmanager
def drive(
    cluster: Cluster, tokens: Sequence[int], *, prefill: str = "prefill-0", decode: str = "decode-0", **rest: Any
) -> Iterator[Drive]:
    nodes = {record.node.name: record for record in cluster.nodes()}
    with (
        grpc.insecure_channel(nodes[prefill].endpoint) as to_prefill,
        grpc.insecure_channel(nodes[decode].endpoint) as to_decode,
    ):
        yield Drive(
            nodes[prefill],
            nodes[decode],
            prefill_pb2_grpc.PrefillNodeStub(to_prefill),
            decode_pb2_grpc.DecodeNodeStub(to_decode),
            tokens,
            **rest,
        )


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return how a call fails; an AssertionError when it does not."""
    try:
        result = call()
        if hasattr(result, "__next__"):
            list(result)
    except grpc.RpcError as err:
        return status_of(err)
    raise AssertionError("nothing was refused")


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def s(self) -> float:
        return time.monotonic() - self._began_s


def best_of_three(attempt: Callable[[int], tuple[float, ...]], limits: tuple[float, ...]) -> None:
    """Hold the least that up to three attempts measured to limits: what disturbs a machine only ever adds.

    Args:
        attempt: takes its number and returns a measurement for each limit.
    """
    seen: list[tuple[float, ...]] = []
    for number in range(3):
        seen.append(attempt(number))
        least = [min(values) for values in zip(*seen, strict=True)]
        if all(value < limit for value, limit in zip(least, limits, strict=True)):
            return
    raise AssertionError(f"{seen}: not under {limits}")
