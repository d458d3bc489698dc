"""Plays the router for one request, to see what only the nodes say: admission, early bytes, step times."""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from cluster.cluster import Cluster
from kvrelay.core import prefix_hash
from kvrelay.proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    fleet_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)

CALL_S = 60.0


@dataclass(slots=True)
class Seen:
    """What both nodes said about one request."""

    cached_tokens: int = 0
    relayed_bytes: int = 0  # by prefill
    token_ids: list[int] = field(default_factory=list)
    admitted: decode_pb2.DecodeAdmitted = field(default_factory=decode_pb2.DecodeAdmitted)
    done: decode_pb2.DecodeDone = field(default_factory=decode_pb2.DecodeDone)


class RouterForTests:
    """Holds the channels to one prefill and one decode node of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        records = {record.role: record for record in cluster.nodes()}
        self._prefill, self._decode = records[fleet_pb2.NODE_ROLE_PREFILL], records[fleet_pb2.NODE_ROLE_DECODE]
        self.prefill = prefill_pb2_grpc.PrefillNodeStub(grpc.insecure_channel(self._prefill.endpoint))
        self.decode = decode_pb2_grpc.DecodeNodeStub(grpc.insecure_channel(self._decode.endpoint))
        self._holder = common_pb2.Incarnation(name="router-for-tests", start_id=secrets.randbits(63))

    def run(self, prompt: Sequence[int], *, max_tokens: int) -> Seen:
        """Reserve, prefill and decode; the whole must take less than a lease, for nobody renews it."""
        request = common_pb2.RequestRef(request_id=secrets.token_hex(8), attempt=1)
        ids = struct.pack(f"<{len(prompt)}I", *prompt)
        sampling = common_pb2.Sampling(max_tokens=max_tokens, repetition_penalty=1.0, top_p=1.0, ignore_eos=True)
        seed = prefix_hash.seed(fingerprint=self._decode.layout_fingerprint)
        ticket = self.decode.Reserve(
            decode_pb2.ReserveRequest(
                request=request, holder=self._holder, node=self._decode.node, writer=self._prefill.node,
                ring_size=self._prefill.ring_size, packed_ids=ids, sampling=sampling,
                layout_fingerprint=self._decode.layout_fingerprint, prefix_seed=seed, timeout_ms=int(CALL_S * 1000),
            ),
            timeout=CALL_S,
        ).ticket  # fmt: skip
        seen = Seen()
        decoding = self.decode.Decode(decode_pb2.DecodeRequest(request=request, epoch=ticket.epoch), timeout=CALL_S)
        reader = threading.Thread(target=_read_decode, args=(decoding, seen))
        work = prefill_pb2.PrefillRequest(
            request=request, holder=self._holder, node=self._prefill.node, packed_ids=ids, sampling=sampling,
            ticket=ticket, prefix_seed=seed,
        )  # fmt: skip
        reader.start()
        for event in self.prefill.Prefill(work, timeout=CALL_S):
            kind = event.WhichOneof("event")
            if kind == "started":
                seen.cached_tokens = event.started.cached_tokens
            elif kind == "first_token":
                seen.token_ids.insert(0, event.first_token.token.token_id)
            elif kind == "done":
                seen.relayed_bytes = event.done.relayed_bytes
        reader.join()
        return seen


def _read_decode(stream: object, seen: Seen) -> None:
    for event in stream:  # type: ignore[attr-defined]
        kind = event.WhichOneof("event")
        if kind == "admitted":
            seen.admitted = event.admitted
        elif kind == "tokens":
            seen.token_ids += [one.token_id for one in event.tokens.tokens]
        elif kind == "done":
            seen.done = event.done
