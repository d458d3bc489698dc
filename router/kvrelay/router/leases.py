"""Keeping this router's sessions on nodes alive, from a thread of its own that no request can starve.

One Renew call per node lists all that this router holds there. A session that a node does not know twice in a row is
lost; once is no proof, since the node may have ended it while its last word was on the way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from kvrelay.core.health import Beats
from kvrelay.core.types import Incarnation, Role
from kvrelay.proto import convert
from kvrelay.proto.server import connect_blocking
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc

log = logging.getLogger(__name__)

OnLost = Callable[[], None]  # called on the lease thread


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that grants leases."""

    role: Role
    endpoint: str


@dataclass(slots=True)
class _Held:
    on_lost: OnLost
    unknown_before: bool = False


@dataclass(slots=True)
class _Grantor:
    channel: grpc.Channel | None = None  # made by the lease thread: a request does not wait for it
    held: dict[str, _Held] = field(default_factory=dict)


class LeaseKeeper:
    """Thread-safe. `hold` before work begins on a node, `drop` when it has ended."""

    def __init__(self, holder: Incarnation, *, lease_s: float, max_message_bytes: int, tls: Tls | None = None) -> None:
        self._holder = holder
        self._interval_s = lease_s / 3
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._lock = threading.Lock()
        self._grantors: dict[Peer, _Grantor] = {}
        self._stopping = threading.Event()
        self._beats = Beats(period_s=2 * self._interval_s)  # a round waits, and then for nodes that do not answer
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for grantor in self._grantors.values():
            _close(grantor)

    def stuck_s(self) -> float:
        """Return for how long the thread is late. Any thread."""
        return self._beats.stuck_s()

    def hold(self, peer: Peer, request_id: str, on_lost: OnLost) -> None:
        with self._lock:
            self._grantors.setdefault(peer, _Grantor()).held[request_id] = _Held(on_lost)

    def drop(self, peer: Peer, request_id: str) -> None:
        with self._lock:
            grantor = self._grantors.get(peer)
            if grantor is not None:
                grantor.held.pop(request_id, None)

    @property
    def num_held(self) -> int:
        with self._lock:
            return sum(len(grantor.held) for grantor in self._grantors.values())

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._beats.beat()
            self._renew_all()

    def _renew_all(self) -> None:
        calls = []
        with self._lock:
            for peer in [peer for peer, grantor in self._grantors.items() if not grantor.held]:
                _close(self._grantors.pop(peer))
            held = [(peer, grantor, list(grantor.held)) for peer, grantor in self._grantors.items()]
        for peer, grantor, request_ids in held:
            if grantor.channel is None:
                grantor.channel = connect_blocking(
                    peer.endpoint, max_message_bytes=self._max_message_bytes, tls=self._tls
                )
            request = common_pb2.RenewRequest(holder=convert.incarnation_to_pb(self._holder), request_ids=request_ids)
            # All nodes are asked at once: a node that does not answer must not delay the others.
            calls.append((peer, _stub(peer, grantor.channel).Renew.future(request, timeout=self._interval_s)))
        for peer, call in calls:
            try:
                self._note_unknown(peer, set(call.result().unknown_request_ids))
            except grpc.RpcError as err:
                # A node that cannot be reached lets its leases run out; the request's own streams report it.
                log.debug("renewal at %s failed: %s", peer.endpoint, err)

    def _note_unknown(self, peer: Peer, unknown: set[str]) -> None:
        lost: list[OnLost] = []
        with self._lock:
            held = self._grantors[peer].held if peer in self._grantors else {}
            for request_id, entry in held.items():
                if request_id in unknown and entry.unknown_before:
                    lost.append(entry.on_lost)
                entry.unknown_before = request_id in unknown
        for on_lost in lost:
            on_lost()


def _close(grantor: _Grantor) -> None:
    if grantor.channel is not None:
        grantor.channel.close()


def _stub(peer: Peer, channel: grpc.Channel) -> prefill_pb2_grpc.PrefillNodeStub | decode_pb2_grpc.DecodeNodeStub:
    if peer.role is Role.PREFILL:
        return prefill_pb2_grpc.PrefillNodeStub(channel)
    return decode_pb2_grpc.DecodeNodeStub(channel)
