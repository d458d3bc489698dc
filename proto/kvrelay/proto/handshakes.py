"""TLS handshakes that came to nothing, counted without gRPC's help.

gRPC ends a failed handshake (plain text, a certificate of another CA) below the application and tells nobody. But it
asks for the server's certificate when a handshake begins, and each call says whose connection it came over. A handshake
that no connection's first call followed within a while has failed, or its connection is of no use to anybody.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable

SETTLE_S = 5.0  # from a handshake's begin to the first call; our channels connect when they are called
_MOST_PEERS = 1 << 16
log = logging.getLogger(__name__)


class Handshakes:
    """Of one server. `begun` may be called on any thread, the rest on the event loop."""

    def __init__(self, on_failed: Callable[[], None], *, settle_s: float = SETTLE_S) -> None:
        """`on_failed` is called on the event loop, `settle_s` after each handshake that no first call followed."""
        self._on_failed = on_failed
        self._settle_s = settle_s
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._open: dict[int, None] = {}  # begun and not followed by a call, oldest first
        self._peers: OrderedDict[str, None] = OrderedDict()  # with calls, by address and port
        self._has_logged = False

    def begun(self) -> None:
        """A peer has connected."""
        number = next(self._numbers)
        self._open[number] = None
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._settle_s, self._settle, number)
        except RuntimeError:  # the loop is closed: the process is ending
            log.debug("a connection came after the end of the event loop")

    def called(self, peer: str) -> None:
        """A call has come from this address and port."""
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return
        self._peers[peer] = None
        if len(self._peers) > _MOST_PEERS:
            self._peers.popitem(last=False)
        # Which handshake it was is not known: the latest is the likeliest, and only how many are left counts.
        if self._open:
            self._open.popitem()

    def _settle(self, number: int) -> None:
        if number not in self._open:
            return
        del self._open[number]
        if not self._has_logged:
            self._has_logged = True
            log.warning(
                "a peer connected and no call came: plain text, or a certificate of another CA? gRPC's own line "
                "(handshake failed) says why; all are counted, and this is said once"
            )
        self._on_failed()
