"""Scattered pieces written into a peer's pool by a kernel of our own, around another transport that does the rest.

Where the peer's pool can be mapped, one kernel copies all pieces of a part from page to page, or of several parts, but
for the last bytes: these the other transport writes when the kernel has ended, with the notices bound to them. So a
notice follows its data as ever, a peer that died fails the handles as ever, and each byte is counted once.

A fence is left to the other transport when every kernel that was asked for before has ended and its last bytes are
posted. A mapping is closed when no kernel that writes through it is left.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.direct_queue import DirectQueue, DirectWrite, Link, MappedPool
from kvrelay.kv_transfer.mapping import Mapping, boot_id
from kvrelay.kv_transfer.notice_bundle import unbundle
from kvrelay.kv_transfer.packing import is_scattered
from kvrelay.kv_transfer.plan import Copy, table_of
from kvrelay.kv_transfer.transport import (
    PENDING,
    Address,
    Failed,
    Handle,
    Progress,
    Transport,
    digest,
    same_rank,
)

log = logging.getLogger(__name__)

ROUTE = "cuda_ipc/direct"


class MappablePool(Protocol):
    """Our own pool, and the way to those of others."""

    def export(self) -> tuple[bytes, int]:
        """Return the handle that other processes open, and where the pool begins in what they will map.

        Raises:
            TransferError: it cannot be mapped.
        """
        ...

    def open(self, handle: bytes, offset_bytes: int, num_bytes: int) -> MappedPool:
        """Map a peer's pool, which begins `offset_bytes` behind what the handle stands for.

        Raises:
            TransferError: this cannot be done, or the pool does not lie in what was mapped.
        """
        ...


@dataclass(slots=True)
class _Fence:
    """A fence that waits for kernels."""

    peer: str
    cell: int
    value: int
    behind: list[DirectWrite] = field(default_factory=list)
    written: Handle | None = None
    failure: str = ""


class DirectTransport:
    """One agent: what is scattered goes directly where it can, and all else through `other`."""

    def __init__(self, other: Transport, pool: MappablePool, *, counters: Counters) -> None:
        self._other, self._pool = other, pool
        self._queue = DirectQueue(other, counters)
        self._links: dict[str, Link] = {}
        self._leaving: list[Link] = []  # forgotten, but still written to
        self._address = other.address()
        try:
            mapping = Mapping(boot_id(), *pool.export()).encode()
        except TransferError as err:
            log.info("%s offers no mapping of its pool: %s", self._address.agent_name, err)
        else:
            self._address = replace(self._address, mapping=mapping, mapping_digest=digest(mapping))

    @property
    def name(self) -> str:
        return self._other.name

    def address(self) -> Address:
        return self._address

    def connect(self, address: Address) -> str:
        peer = self._other.connect(address)
        known = self._links.get(peer)
        if known is not None and known.address == address:
            return peer
        for other in [one for one in self._links if same_rank(one, peer)]:  # its earlier lives, too
            self._leave(other)
        self._links[peer] = Link(peer, address, self._mapped(address))
        return peer

    def _mapped(self, address: Address) -> MappedPool | None:
        """Return a peer's pool, or None, and say why."""
        if address.agent_name == self._address.agent_name:
            return None  # memory of our own is not mapped a second time
        try:
            mapping = Mapping.decode(address.mapping)
            pool = self._pool.open(mapping.handle, mapping.offset_bytes, address.pool.num_bytes)
        except TransferError as err:
            log.info("scattered pages go to %s through %s: %s", address.agent_name, self._other.name, err)
            return None
        log.info("scattered pages go to %s directly, into its mapped pool", address.agent_name)
        return pool

    def route(self, peer: str) -> str:
        route = self._other.route(peer)
        return " or ".join(filter(None, (ROUTE, route))) if self.scatters(peer) else route

    def scatters(self, peer: str) -> bool:
        return peer in self._links and self._links[peer].pool is not None

    def disconnect(self, peer: str) -> None:
        self._leave(peer)
        self._other.disconnect(peer)

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        link = self._links.get(peer)
        if link is None or link.pool is None:
            return self._other.post(peer, copies, notice)
        table = table_of(copies)
        num_bytes = int(np.add.reduce(table[:, 2]))
        if not is_scattered(len(table), num_bytes):
            return self._other.post(peer, copies, notice)
        return self._queue.add(link, table, num_bytes, notice)

    def write_fence(self, peer: str, cell: int, value: int) -> Handle:
        fence = _Fence(peer, cell, value, self._queue.unsettled(peer))
        if not self._is_due(fence):
            return fence
        return self._other.write_fence(peer, cell, value)

    def poll(self, handle: Handle) -> Progress:
        if isinstance(handle, DirectWrite):
            progress = self._queue.poll(handle)
            if self._leaving:
                self._close_unused()
            return progress
        if isinstance(handle, _Fence):
            return self._poll_fence(handle)
        return self._other.poll(handle)

    def notices(self) -> list[tuple[str, bytes]]:
        return [(agent, notice) for agent, raw in self._other.notices() for notice in unbundle(raw)]

    def release(self, handle: Handle) -> None:
        if isinstance(handle, DirectWrite):
            assert handle.progress is not PENDING, "a kernel still reads its sources"
            return
        inner = handle.written if isinstance(handle, _Fence) else handle
        if inner is not None:
            self._other.release(inner)

    def close(self) -> None:
        for peer in list(self._links):
            self._leave(peer)
        self._other.close()

    def _poll_fence(self, fence: _Fence) -> Progress:
        if fence.written is None and not fence.failure and self._is_due(fence):
            try:
                fence.written = self._other.write_fence(fence.peer, fence.cell, fence.value)
            except TransferError as err:
                fence.failure = str(err)
        if fence.failure:
            return Failed(fence.failure)
        return PENDING if fence.written is None else self._other.poll(fence.written)

    def _is_due(self, fence: _Fence) -> bool:
        """Return whether every kernel in front has ended, and what follows it is posted: nothing of it comes later."""
        self._queue.advance()
        self._close_unused()
        return not any(write.runs for write in fence.behind)

    def _leave(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None and link.pool is not None:
            self._leaving.append(link)
            self._close_unused()

    def _close_unused(self) -> None:
        for link in [one for one in self._leaving if not one.in_flight]:
            self._leaving.remove(link)
            assert link.pool is not None
            link.pool.close()
