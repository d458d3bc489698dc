"""When a link that was given up can deliver nothing more.

A write whose handle has failed may be in part in a TCP socket of this host, whose kernel goes on sending it when the
network is back, even after UCX has closed the socket. So the link has ended only when every socket that had unsent
bytes after UCX let go of the peer has sent or lost them. What was sent lies in the peer's sockets: it drains them.
RDMA needs no more than letting go: a destroyed queue pair sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvrelay.core.clock import Clock

_LET_GO_S = 1.0  # for UCX, while it is polled, to take the endpoint down
_FILES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_SYN_SENT, _LISTEN = "02", "0A"  # these carry no data, whatever their queue says

Sockets = frozenset[tuple[str, str]]


class LinkEnd:
    """Of one peer, from when the transport was told to forget it. Polled on the transfer thread."""

    def __init__(self, clock: Clock, *, unsent: Callable[[], Sockets] | None = None) -> None:
        self._clock = clock
        self._unsent = unsent or unsent_sockets
        self._from_s = clock() + _LET_GO_S
        self._left: Sockets | None = None

    def is_over(self) -> bool:
        """Return whether nothing that was written over the link is still to leave this host."""
        if self._clock() < self._from_s:
            return False
        now = self._unsent()
        self._left = now if self._left is None else self._left & now
        return not self._left


def unsent_sockets() -> Sockets:
    """Return the TCP connections of this network namespace, also those without a process, that have bytes to send.

    Which of them UCX used is not known, so all count.
    """
    found = set()
    for path in _FILES:
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, remote, state, queues, *_ = line.split()
            if int(queues.partition(":")[0], 16) and state not in (_SYN_SENT, _LISTEN):
                found.add((local, remote))
    return frozenset(found)
