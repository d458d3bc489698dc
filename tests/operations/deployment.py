"""What an operator can do to a cluster, whatever it runs on; the list of operations tests is written against this."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import grpc

from cluster.cluster import Client

MODEL = "v3_noaux"  # the oracle checkpoint that every deployment serves
ROLES = ("router", "prefill", "decode")


class Dial(Protocol):
    """Connects to a router or node; see `client.connect`."""

    def __call__(self, endpoint: str, /, *, watch_health: bool = False) -> grpc.Channel: ...


class Deployment(Protocol):
    """A running cluster of oracle model MODEL. Node names begin with their role."""

    @property
    def client(self) -> Client:
        """A client of all its routers, with the README's retry policy."""
        ...

    def members(self, role: str) -> list[str]:
        """Return the names of what runs in a role, oldest first."""
        ...

    def scale(self, role: str, count: int) -> None:
        """Start or gently stop members of a role until there are `count`; return when they serve."""
        ...

    def restart(self, name: str) -> None:
        """Stop one member gently and start it again; return when it serves."""
        ...

    def kill(self, name: str) -> None:
        """End one member at once, without a word."""
        ...

    def revive(self, name: str) -> None:
        """Start a killed member again under its name; return when it serves."""
        ...

    def isolated(self, one: str, other: str) -> AbstractContextManager[None]:
        """For as long as the block lasts, nothing that one member sends reaches the other."""
        ...

    def logs(self) -> str:
        """Return the end of what every member has said."""
        ...
