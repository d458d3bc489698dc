"""What leaves one rank while it computes: the rows of requests as they become final, and those of pushes between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kvrelay.core.shard import Span
from kvrelay.prefill_node.late_relay import LateRelay
from kvrelay.prefill_node.rank_request import RankRequest, Writer
from kvrelay.prefill_node.relay import Relay
from kvrelay.prefill_node.relay_stream import RelayStream
from kvrelay.proto.v1 import handoff_pb2

LateTicket = Callable[[str], handoff_pb2.Ticket | None]  # of a request, once it is there


class RankRelays:
    """Used by the step thread only."""

    def __init__(
        self, *, open_writer: Callable[[handoff_pb2.Ticket], Writer], device: torch.device, rank: int, num_layers: int
    ) -> None:
        """`device`: of the latent pool."""
        self.late_ticket: LateTicket = lambda _: None  # set before the first step where tickets may come late
        self._open_writer = open_writer
        self._stream = RelayStream(device)
        self._rank = rank
        self._num_layers = num_layers

    @property
    def runs_beside(self) -> bool:
        """What leaves does so on a stream of its own, while the thread goes on."""
        return self._stream.runs_beside

    def begin(self, request: RankRequest, ticket: handoff_pb2.Ticket) -> Relay:
        """Open a request's hand-off; its cached rows leave first."""
        request.writer = self._open_writer(ticket)
        request.relay = relay = Relay(
            request.writer,
            request.table,
            rank=self._rank,
            resident_tokens=ticket.resident_tokens,
            num_layers=self._num_layers,
        )
        relay.queue_cached(request.cached_tokens)
        return relay

    def begin_push(self, request: RankRequest, ticket: handoff_pb2.Ticket) -> None:
        """Open a push, of whose rows all are there."""
        relay = self.begin(request, ticket)
        with self._stream.behind(self._stream.mark()):
            relay.seal(first_token=None, cached_tokens=0)

    def mark(self, request: RankRequest) -> torch.cuda.Event | None:
        """Return the moment at which what was launched so far is done, for a request that is handed over."""
        return None if request.relay is None else self._stream.mark()

    def send_early(
        self, request: RankRequest, layer: int, spans: Sequence[Span], final: torch.cuda.Event | None
    ) -> None:
        """Send own rows of a layer, which are there when `final` is reached."""
        if request.relay is not None:
            with self._stream.behind(final):
                relay = self._now(request)
                assert relay is not None, "it was there just now"
                relay.rows_final(layer, spans)

    def send_late(self, request: RankRequest, layer: int, spans: Sequence[Span]) -> None:
        """Send rows of a layer that came from other ranks, and a portion of what waits.

        They are there once the ring has passed; without any, nothing waits for attention.
        """
        relay = request.relay
        if relay is not None and (spans or relay.pending):
            with self._stream.behind(self._stream.mark() if spans else None):
                relay.rows_final(layer, spans)
                relay.pump()

    def pump_pushes(self, requests: Iterable[RankRequest]) -> None:
        """Send a portion of each push: another node waits for them, and a chunk may take seconds."""
        pending = [one.relay for one in requests if one.is_push and one.relay and one.relay.pending]
        if pending:
            with self._stream.behind(self._stream.mark()):
                for relay in pending:
                    relay.pump()

    def pump(self, requests: Iterable[RankRequest]) -> None:
        """Send a portion of everything, between two steps."""
        with self._stream.behind(self._stream.mark()):
            for request in requests:
                if (relay := self._now(request)) is not None:
                    relay.pump()

    def _now(self, request: RankRequest) -> Relay | LateRelay | None:
        """Return the relay of a request, begun now if its ticket has just come. Inside `RelayStream.behind`."""
        late = request.relay
        if isinstance(late, LateRelay) and (ticket := self.late_ticket(request.key)) is not None:
            late.pass_to(self.begin(request, ticket))
        return request.relay
