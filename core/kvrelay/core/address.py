"""Addresses as text, host:port: which are well formed, and which one a process tells others."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

_PORT = re.compile(r"[0-9]{1,5}")
_WILDCARDS = frozenset({"0.0.0.0", "[::]", "*"})  # noqa: S104 - compared, not bound


def is_address(text: str, *, least_port: int = 0) -> bool:
    """Return whether a text is host:port; a URL is not."""
    host, _, port = text.rpartition(":")
    return bool(host and "/" not in host and _PORT.fullmatch(port) and least_port <= int(port) < 2**16)


def advertised(*, bound: str, advertise: str, index_url: str) -> str:
    """Return the host:port that others are told.

    `advertise` when it is set, else the bound address; for one that listens everywhere, the address of the interface
    that leads to the index server, since all nodes reach that one. So containers need no address in their settings.

    Args:
        bound: host:port that the server listens on.
    """
    host, _, port = bound.rpartition(":")
    if advertise or host not in _WILDCARDS:
        return advertise or bound
    return f"{_own_address(index_url)}:{port}"


def _own_address(index_url: str) -> str:
    index_host = urlsplit(index_url).hostname or "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(index_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket only looks up the route; nothing is sent
            found = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"  # without a route nobody can reach this host either
    return f"[{found}]" if family == socket.AF_INET6 else found
