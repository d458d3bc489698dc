"""Parts on their way into mapped pools: those that wait leave together, in one launch, and are announced by one write.

A batch is parts of one peer. A kernel copies all their pieces but for the last bytes of the last part; when it has
ended, the other transport writes these, with the notices of all parts bound to them. So what became of that write
became of each part. While one kernel runs, the next is queued behind it, and a part that comes meanwhile waits for the
batch after that; batches that have landed meanwhile share the write that follows. So the busier device and host are,
the fewer launches and writes a part costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.notice_bundle import bundle
from kvrelay.kv_transfer.plan import Copies, Copy, CopyTable
from kvrelay.kv_transfer.transport import PENDING, Address, Done, Failed, Handle, Pending, Progress, Transport

WHOLE_BYTES = 16  # pieces that are no multiple of this, or begin between two, are the other transport's
_MOST_RUNNING = 2  # kernels: one runs, and one begins when it ends
# Launched: with more a part that is added waits for others of its round, which come before the device has done so much.
_ENOUGH_BYTES = 48 << 20
_PARTS_A_LOOK = 4  # so many parts wait before the device is asked whether it has done that
# Of a batch. All of it is announced when all has landed, so that a large one would keep a reader from checking.
_MOST_BYTES = 128 << 20
_MOST_PARTS = 64


class MappedPool(Protocol):
    """A peer's pool in our address space."""

    def copy(self, table: CopyTable) -> Callable[[], bool]:
        """Start to copy pieces of our pool into it; the returned call says whether all have landed.

        Calls take effect in their order, the pieces of one call in any. Never waits for the device.

        Raises:
            TransferError: nothing was started.
        """
        ...

    def close(self) -> None:
        """Take it out of our address space; only when all copies have landed."""
        ...


@dataclass(slots=True, eq=False)
class Link:
    """A connected peer; its pool is None where it cannot be mapped."""

    peer: str
    address: Address
    pool: MappedPool | None
    in_flight: int = 0  # parts whose kernels have not ended


@dataclass(slots=True, eq=False)
class DirectWrite:
    """One part."""

    link: Link
    table: CopyTable
    num_bytes: int
    notice: bytes
    turn: int  # the last one in which somebody asked for it
    runs: bool = True  # its kernel has not ended, as far as is known, or what follows that is not posted
    progress: Progress = PENDING


@dataclass(slots=True, eq=False)
class _Batch:
    """What one kernel copies."""

    link: Link
    writes: list[DirectWrite]
    num_bytes: int
    last: Copy  # what is written when it has ended
    landed: Callable[[], bool]


@dataclass(slots=True, eq=False)
class _Tail:
    """The write that follows the kernels of some parts."""

    writes: list[DirectWrite]
    handle: Handle


class DirectQueue:
    """Not locked: one thread owns it, with the transport that writes what follows a kernel."""

    def __init__(self, other: Transport, counters: Counters) -> None:
        self._other, self._counters = other, counters
        self._waiting: deque[DirectWrite] = deque()
        self._running: deque[_Batch] = deque()  # their kernels end in this order
        self._landed: list[_Batch] = []  # their kernels have ended
        self._tails: list[_Tail] = []
        self._turn = 0

    def add(self, link: Link, table: CopyTable, num_bytes: int, notice: bytes) -> DirectWrite:
        """Copy a part's pieces: now, if too little is launched, or with others that come."""
        assert link.pool is not None
        write = DirectWrite(link, table, num_bytes, notice, self._turn)
        link.in_flight += 1
        self._waiting.append(write)
        if len(self._waiting) % _PARTS_A_LOOK == 0:
            self._note_landed()
        if sum(batch.num_bytes for batch in self._running) < _ENOUGH_BYTES:
            self._launch()
        return write

    def poll(self, write: DirectWrite) -> Progress:
        """Say how a part is doing. The device and the other transport are asked once while all are polled in turn."""
        if write.progress is PENDING:
            if write.turn == self._turn:
                self.advance()
            write.turn = self._turn
        return write.progress

    def advance(self) -> None:
        """Launch what waits, write what follows kernels that have ended, and see what became of such writes."""
        self._turn += 1
        self._note_landed()
        self._launch()  # first: the device is not to wait for what comes now
        while self._landed:
            link = self._landed[0].link
            batches = [batch for batch in self._landed if batch.link is link]
            self._landed = [batch for batch in self._landed if batch.link is not link]
            self._counters.add("direct_bytes_total", sum(batch.num_bytes - batch.last.num_bytes for batch in batches))
            writes = [write for batch in batches for write in batch.writes]
            self._post(link, writes, [batch.last for batch in batches])
        for tail in list(self._tails):
            progress = self._other.poll(tail.handle)
            if not isinstance(progress, Pending):
                self._tails.remove(tail)
                self._other.release(tail.handle)
                _end(tail.writes, progress)

    def unsettled(self, peer: str) -> list[DirectWrite]:
        """Return the parts of a peer of which something may still be started."""
        batches = (*self._landed, *self._running)
        writes = [write for batch in batches for write in batch.writes]
        return [write for write in (*writes, *self._waiting) if write.link.peer == peer]

    def _note_landed(self) -> None:
        while self._running and self._running[0].landed():
            batch = self._running.popleft()
            batch.link.in_flight -= len(batch.writes)
            self._landed.append(batch)

    def _launch(self) -> None:
        while self._waiting and len(self._running) < _MOST_RUNNING:
            writes = self._take()
            link = writes[0].link
            assert link.pool is not None
            table = np.concatenate([write.table for write in writes])
            if not _may_be_copied(table, link.address.pool.num_bytes):
                link.in_flight -= len(writes)
                for write in writes:
                    self._post(link, [write], Copies(write.table))
                continue
            last = _cut_last(table)
            try:
                landed = link.pool.copy(table)
            except TransferError as err:
                link.in_flight -= len(writes)
                _end(writes, Failed(str(err)))
                continue
            self._counters.add("parts_direct_total", len(writes))
            self._running.append(_Batch(link, writes, sum(write.num_bytes for write in writes), last, landed))

    def _take(self) -> list[DirectWrite]:
        """Remove the next batch from what waits: the longest that has waited, and what goes the same way."""
        link, room_bytes = self._waiting[0].link, _MOST_BYTES
        taken: list[DirectWrite] = []
        others: deque[DirectWrite] = deque()
        while self._waiting:
            write = self._waiting.popleft()
            if write.link is not link:
                others.append(write)
            elif taken and (write.num_bytes > room_bytes or len(taken) == _MOST_PARTS):
                self._waiting.appendleft(write)
                break
            else:
                taken.append(write)
                room_bytes -= write.num_bytes
        self._waiting.extendleft(reversed(others))
        return taken

    def _post(self, link: Link, writes: list[DirectWrite], copies: Sequence[Copy]) -> None:
        """Write what no kernel does, with the notices of parts."""
        try:
            handle = self._other.post(link.peer, copies, bundle([write.notice for write in writes]))
        except TransferError as err:
            _end(writes, Failed(str(err)))
            return
        for write in writes:
            write.runs = False
        self._tails.append(_Tail(writes, handle))


def _end(writes: Sequence[DirectWrite], progress: Progress) -> None:
    for write in writes:
        write.runs = False
        write.progress = Done(write.num_bytes) if isinstance(progress, Done) else progress


def _may_be_copied(table: CopyTable, pool_bytes: int) -> bool:
    """Return whether pieces lie whole in the peer's pool, for no one else looks, and a kernel can move them."""
    bits = int(np.bitwise_or.reduce(table, axis=None))  # negative when one number is
    if bits >> 62 or bits % WHOLE_BYTES or not table[-1, 2]:  # below that no sum overflows
        return False
    return int(np.maximum.reduce(table[:, 1] + table[:, 2])) <= pool_bytes


def _cut_last(table: CopyTable) -> Copy:
    """Take the last bytes out of a table and return them."""
    source, target, num_bytes = table[-1].tolist()
    before = num_bytes - WHOLE_BYTES
    table[-1, 2] = before
    return Copy(source + before, target + before, WHOLE_BYTES)
