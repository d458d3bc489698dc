"""Channels to the nodes of a fleet, by endpoint: opened when first asked for, closed when no request can be on them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from grpc import aio

from kvrelay.core.clock import Clock
from kvrelay.proto.v1 import decode_pb2_grpc, prefill_pb2_grpc
from kvrelay.router.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Line:
    """A channel to an endpoint, and the methods there, of a node of either role.

    To look methods up for each call takes longer than the call's own work.
    """

    channel: aio.Channel
    prefill: prefill_pb2_grpc.PrefillNodeAsyncStub
    decode: decode_pb2_grpc.DecodeNodeAsyncStub
    prepared: Prepared

    @classmethod
    def over(cls, channel: aio.Channel) -> Line:
        prefill: prefill_pb2_grpc.PrefillNodeAsyncStub = prefill_pb2_grpc.PrefillNodeStub(channel)
        return cls(channel, prefill, decode_pb2_grpc.DecodeNodeStub(channel), Prepared(prefill))


class Lines:
    """To be used from one event loop."""

    def __init__(self, connect: Callable[[str], aio.Channel], *, max_request_s: float, clock: Clock) -> None:
        """`max_request_s`: no request lasts longer."""
        self._connect = connect
        self._max_request_s = max_request_s
        self._clock = clock
        self._lines: dict[str, Line] = {}  # by endpoint
        # A node that left the registry may still be streaming, so its channel is closed only when no request can be.
        self._retired: list[tuple[float, aio.Channel]] = []

    def to(self, endpoint: str) -> Line:
        """Return the line to an endpoint, opened now if there is none."""
        line = self._lines.get(endpoint)
        if line is None:
            line = self._lines[endpoint] = Line.over(self._connect(endpoint))
        return line

    def keep(self, endpoints: AbstractSet[str]) -> None:
        """Retire the lines to all other endpoints."""
        for endpoint in self._lines.keys() - endpoints:
            line = self._lines.pop(endpoint)
            line.prepared.close()
            self._retired.append((self._clock() + self._max_request_s, line.channel))

    async def close_retired(self) -> None:
        """Close the retired ones on which no request can be any more."""
        now_s = self._clock()
        due = [channel for close_at_s, channel in self._retired if close_at_s <= now_s]
        self._retired = [entry for entry in self._retired if entry[0] > now_s]
        for channel in due:
            await channel.close()

    async def close(self) -> None:
        """Close all, whatever is on them."""
        for channel in (*(line.channel for line in self._lines.values()), *(channel for _, channel in self._retired)):
            await channel.close()
