"""Scattered pieces written into a peer's pool by a kernel of our own, around another transport that does the rest.

Where the peer's pool can be mapped, one kernel copies all pieces of a part from page to page, but for the last bytes:
these the other transport writes when the kernel has ended, with the notice bound to them. So a notice follows its data
as ever, a peer that died fails the handle as ever, and each byte is counted once.

A fence is left to the other transport when every kernel that was started before has ended and its last bytes are
posted. A mapping is closed when no kernel that writes through it is left.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.mapping import Mapping, boot_id
from kvrelay.kv_transfer.packing import is_scattered
from kvrelay.kv_transfer.plan import Copy, CopyTable, table_of
from kvrelay.kv_transfer.transport import (
    PENDING,
    Address,
    Done,
    Failed,
    Handle,
    Progress,
    Transport,
    digest,
    same_rank,
)

log = logging.getLogger(__name__)

ROUTE = "cuda_ipc/direct"
WHOLE_BYTES = 16  # pieces that are no multiple of this, or begin between two, are the other transport's


class MappedPool(Protocol):
    """A peer's pool in our address space."""

    def copy(self, table: CopyTable) -> Callable[[], bool]:
        """Start to copy pieces of our pool into it; the returned call says whether all have landed.

        Copies land in the order of the calls. Never waits for the device.

        Raises:
            TransferError: nothing was started.
        """
        ...

    def close(self) -> None:
        """Take it out of our address space; only when all copies have landed."""
        ...


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
class _Link:
    """A connected peer; its pool is None where it cannot be mapped."""

    address: Address
    pool: MappedPool | None
    in_flight: int = 0  # kernels that may still write into it


@dataclass(slots=True)
class _Write:
    """A part whose pieces a kernel copies; what follows it is written when the kernel has ended."""

    peer: str
    link: _Link
    num_bytes: int
    last: Copy
    notice: bytes
    landed: Callable[[], bool]
    runs: bool = True  # the kernel does, as far as was asked
    tail: Handle | None = None
    failure: str = ""


@dataclass(slots=True)
class _Fence:
    """A fence that waits for kernels."""

    peer: str
    cell: int
    value: int
    behind: list[_Write] = field(default_factory=list)
    written: Handle | None = None
    failure: str = ""


class DirectTransport:
    """One agent: what is scattered goes directly where it can, and all else through `other`."""

    def __init__(self, other: Transport, pool: MappablePool, *, counters: Counters) -> None:
        self._other, self._pool, self._counters = other, pool, counters
        self._links: dict[str, _Link] = {}
        self._leaving: list[_Link] = []  # forgotten, but still written to
        self._running: deque[_Write] = deque()  # whose kernel has not ended; they end in this order
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
        self._links[peer] = _Link(address, self._mapped(address))
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
        if link is None or link.pool is None or not is_scattered(copies):
            return self._other.post(peer, copies, notice)
        table = table_of(copies)
        if not _may_be_copied(table, link.address.pool.num_bytes):
            return self._other.post(peer, copies, notice)
        first, last = _split(table)
        landed = link.pool.copy(first)
        link.in_flight += 1
        self._counters.add("parts_direct_total", 1)
        write = _Write(peer, link, int(table[:, 2].sum()), last, notice, landed)
        self._running.append(write)
        return write

    def write_fence(self, peer: str, cell: int, value: int) -> Handle:
        fence = _Fence(peer, cell, value, [one for one in self._running if one.peer == peer])
        if not self._is_due(fence):
            return fence
        return self._other.write_fence(peer, cell, value)

    def poll(self, handle: Handle) -> Progress:
        if isinstance(handle, _Write):
            return self._poll_write(handle)
        if isinstance(handle, _Fence):
            return self._poll_fence(handle)
        return self._other.poll(handle)

    def notices(self) -> list[tuple[str, bytes]]:
        return self._other.notices()

    def release(self, handle: Handle) -> None:
        if isinstance(handle, _Write):
            assert not handle.runs, "a kernel still reads its sources"
            inner = handle.tail
        else:
            inner = handle.written if isinstance(handle, _Fence) else handle
        if inner is not None:
            self._other.release(inner)

    def close(self) -> None:
        for peer in list(self._links):
            self._leave(peer)
        self._other.close()

    def _poll_write(self, write: _Write) -> Progress:
        if write.runs:
            self._advance()
        if write.failure:
            return Failed(write.failure)
        if write.tail is None:
            return PENDING
        progress = self._other.poll(write.tail)
        return Done(write.num_bytes) if isinstance(progress, Done) else progress

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
        self._advance()
        return not any(write.runs for write in fence.behind)

    def _advance(self) -> None:
        """Write the last bytes of each part whose kernel has ended."""
        while self._running and self._running[0].landed():
            write = self._running.popleft()
            write.runs = False
            write.link.in_flight -= 1
            self._counters.add("direct_bytes_total", write.num_bytes - write.last.num_bytes)
            try:
                write.tail = self._other.post(write.peer, [write.last], write.notice)
            except TransferError as err:
                write.failure = str(err)
            self._close_unused()

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


def _may_be_copied(table: CopyTable, pool_bytes: int) -> bool:
    """Return whether pieces lie whole in the peer's pool, for no one else looks, and a kernel can move them."""
    bits = int(np.bitwise_or.reduce(table, axis=None))  # negative when one number is
    if bits >> 62 or bits % WHOLE_BYTES:  # below that no sum overflows
        return False
    return int(table[:, 2].min()) > 0 and int((table[:, 1] + table[:, 2]).max()) <= pool_bytes


def _split(table: CopyTable) -> tuple[CopyTable, Copy]:
    """Return the pieces without their last bytes, and these."""
    source, target, num_bytes = table[-1].tolist()
    first = table.copy()
    first[-1, 2] -= WHOLE_BYTES
    before = num_bytes - WHOLE_BYTES
    return first, Copy(source + before, target + before, WHOLE_BYTES)
