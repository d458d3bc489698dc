"""All that one agent writes: the open writers by key, and the connections to their peers."""

from __future__ import annotations

import logging
from collections import OrderedDict

from kvrelay.core.clock import Clock
from kvrelay.core.errors import ServeError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.link_end import LinkEnd
from kvrelay.kv_transfer.links import Links
from kvrelay.kv_transfer.outgoing import Outgoing
from kvrelay.kv_transfer.transport import Address, Transport

log = logging.getLogger(__name__)


class Writers:
    """Not locked: the transfer thread owns it; only `bool` may be asked by others."""

    def __init__(self, links: Links, counters: Counters, *, max_idle_peers: int, clock: Clock) -> None:
        """`max_idle_peers`: connections kept for the next hand-off to the same peer."""
        self._links, self._counters, self._clock = links, counters, clock
        self._max_idle_peers = max_idle_peers
        self._outgoing: dict[str, Outgoing] = {}
        self._idle_peers: OrderedDict[str, None] = OrderedDict()  # connected, but no writer is open; oldest first

    def __bool__(self) -> bool:
        """True while some writer is open, or has writes whose end is not known yet."""
        return bool(self._outgoing)

    def __getitem__(self, key: str) -> Outgoing:
        return self._outgoing[key]

    def open(self, transport: Transport, key: str, address: Address, outgoing: Outgoing) -> None:
        """Take a writer and connect to its peer; when that fails, the writer has failed."""
        assert key not in self._outgoing, f"writer {key} is open already"
        self._outgoing[key] = outgoing
        self._idle_peers.pop(outgoing.peer, None)
        try:
            transport.connect(address)
        except ServeError as err:
            outgoing.on_events(outgoing.fail(str(err)))

    def close(self, key: str) -> None:
        """Forget a writer once all its handles have ended."""
        if key in self._outgoing:
            self._outgoing[key].closed = True

    @property
    def is_busy(self) -> bool:
        """Something is to be posted or polled, which somebody waits for."""
        return any(one.busy and not one.awaits_link_end and not one.closed for one in self._outgoing.values())

    @property
    def has_leftovers(self) -> bool:
        """Something is to be polled that nobody waits for any more."""
        return any(one.busy and not one.awaits_link_end and one.closed for one in self._outgoing.values())

    def step(self, transport: Transport) -> bool:
        """Post, poll and fence; return whether anything moved."""
        moved = False
        for key, outgoing in list(self._outgoing.items()):
            moved |= outgoing.step(transport, self._counters)
            if outgoing.has_landed:
                self._links.note_route(transport, outgoing.peer, outgoing.meter)
            if outgoing.closed and not outgoing.busy:
                del self._outgoing[key]
                if all(other.peer != outgoing.peer for other in self._outgoing.values()):
                    self._note_idle(transport, outgoing)
        return moved

    def give_up_lost(self, transport: Transport) -> bool:
        """Give up links whose fence could not be written, and report when they can deliver nothing more.

        Return whether there were any.
        """
        lost = [outgoing for outgoing in self._outgoing.values() if outgoing.awaits_link_end]
        for one in lost:
            if one.link_end is not None:
                if one.link_end.is_over():
                    log.info("the link to %s has ended: nothing of it can land any more", one.peer)
                    one.link_has_ended()
                continue
            if any(other.peer == one.peer and other.in_flight for other in self._outgoing.values()):
                continue  # these are on their way to fail too
            log.warning("the link to %s is given up: no fence could be written", one.peer)
            self._disconnect(transport, one.peer)
            end = LinkEnd(self._clock)
            for other in lost:
                if other.peer == one.peer and other.link_end is None:
                    other.link_end = end
        return bool(lost)

    def _note_idle(self, transport: Transport, last: Outgoing) -> None:
        """Keep the connection to a peer whose last writer has ended, if it is worth it."""
        if last.failure is not None:
            self._disconnect(transport, last.peer)  # so that the next hand-off connects afresh
            return
        self._idle_peers[last.peer] = None
        if len(self._idle_peers) > self._max_idle_peers:
            self._disconnect(transport, self._idle_peers.popitem(last=False)[0])

    def _disconnect(self, transport: Transport, peer: str) -> None:
        transport.disconnect(peer)
        self._links.disconnected(peer)
