"""The data plane as the rest of the hand-off sees it: one-sided writes into a peer's pool, each with a notification.

Implementations: nixl.py (RDMA, NVLink, shared memory, TCP through NIXL over UCX) and loopback.py (plain sockets);
direct.py lets scattered pieces bypass one of these. One thread owns a transport and makes every call: see
agent_thread.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.plan import Copy

CELL_BYTES = 8
Handle = object  # opaque; returned by one transport and given back to the same one


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a transport registers once and that must stay mapped until the process exits.

    When a target unmaps memory that a peer is writing to, the target crashes; so nothing is ever deregistered.
    """

    address: int
    num_bytes: int
    device_id: int = -1  # CUDA device, or -1 for host memory

    def view(self) -> memoryview:
        """Return the bytes, writable. Host memory only."""
        assert self.device_id < 0, f"memory of CUDA device {self.device_id} has no view"
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.address)).cast("B")


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach one agent of the data plane."""

    transport: str
    agent_name: str
    metadata: bytes  # opaque; a blob that does not match its digest is refused before the transport reads it
    metadata_digest: int
    pool: Region
    pool_pages: int
    fence: Region
    mapping: bytes = b""  # opaque; how a writer on the same host maps the pool, empty = it cannot
    mapping_digest: int = 0

    def check(self, *, transport: str) -> None:
        """Raise InvalidRequestError unless this is an address of `transport` in one piece.

        NIXL accepts some damaged metadata (2 of 45 garbled blobs), hence the digest.
        """
        if self.transport != transport:
            raise InvalidRequestError(f"agent {self.agent_name} speaks {self.transport!r}, not {transport!r}")
        if digest(self.metadata) != self.metadata_digest:
            raise InvalidRequestError(f"the metadata of agent {self.agent_name} does not match its digest")
        if self.mapping and digest(self.mapping) != self.mapping_digest:
            raise InvalidRequestError(f"the mapping of agent {self.agent_name} does not match its digest")


def digest(metadata: bytes) -> int:
    return xxhash.xxh3_64_intdigest(metadata)


def agent_name(node: Incarnation, rank: int) -> str:
    """Return the name of one rank's agent; unique over restarts, because NIXL refuses a name it knows."""
    return f"{node}/{rank}"


def node_name(agent: str) -> str:
    """Return the name of the node, the same in all its lives, that an agent's name was made of."""
    return agent.rpartition("/")[0].rpartition("@")[0]


def same_rank(agent: str, other: str) -> bool:
    """Return whether two agents are of one rank of one node, in whatever lives."""
    return node_name(agent) == node_name(other) and agent.rpartition("/")[2] == other.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Pending:
    """A write that may still read its source and land in its target."""


@dataclass(frozen=True, slots=True)
class Done:
    """Everything has landed."""

    num_bytes: int  # as the transport counted them


@dataclass(frozen=True, slots=True)
class Failed:
    """The write ended in an error; parts of it may have landed."""

    reason: str


Progress = Pending | Done | Failed
PENDING = Pending()


class Transport(Protocol):
    """One agent. Not locked; `post` may block for as long as its data takes.

    Whoever wants its peers to make progress must poll: no call runs in the background.
    """

    @property
    def name(self) -> str: ...

    def address(self) -> Address:
        """Return what a peer needs to write here."""
        ...

    def connect(self, address: Address) -> str:
        """Make a peer known and return its agent name; does nothing when it is known already.

        Raises:
            InvalidRequestError: the address is damaged or of another transport.
            TransferError: the transport refuses it.
        """
        ...

    def route(self, peer: str) -> str:
        """Return over which transports and devices writes to a peer go, as far as is known once one has ended.

        Empty = not known; "a or b" = one of these.
        """
        ...

    def scatters(self, peer: str) -> bool:
        """Return whether many small copies to a peer go as fast as few large ones: then nothing is to be packed."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Writes in flight to it still land: this is no fence."""
        ...

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        """Start one write of all `copies`; `notice` reaches the peer after the last byte.

        The sources must not change until `poll` says Done or Failed.

        Raises:
            TransferError: nothing was posted.
        """
        ...

    def write_fence(self, peer: str, cell: int, value: int) -> Handle:
        """Start writing a number into one of the peer's fence cells, after everything posted before.

        Raises:
            TransferError: nothing was posted.
        """
        ...

    def poll(self, handle: Handle) -> Progress:
        """Make progress and say how a write is doing. A dead peer fails the handles to that peer only."""
        ...

    def notices(self) -> list[tuple[str, bytes]]:
        """Make progress as a target; return new (agent name of the writer, notice)."""
        ...

    def release(self, handle: Handle) -> None:
        """Free what a handle holds. Call it once, when it is Done or Failed."""
        ...

    def close(self) -> None:
        """Stop talking. The regions stay registered until the process exits."""
        ...
