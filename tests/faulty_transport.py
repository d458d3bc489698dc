"""A transport that does one wrong thing to the writes that pass through it, and is otherwise the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from kvrelay.core.errors import TransferError
from kvrelay.kv_transfer import notice as notices
from kvrelay.kv_transfer.notice import Notice
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import PENDING, Done, Failed, Handle, Progress, Transport

Fault = Callable[["FaultyTransport", str, Sequence[Copy], bytes], Handle]


@dataclass
class _Frozen:
    """A handle that never ends, or one of nothing that is done."""

    progress: Progress


@dataclass
class _Twice:
    """Two writes as one; each announces itself only when it is polled."""

    first: Handle
    second: Handle


class FaultyTransport:
    """Applies `fault` to each write from number `from_write` on."""

    def __init__(self, real: Transport, fault: Fault, *, from_write: int = 2) -> None:
        self.real = real
        self.freezes_fences = False
        self.fails_fences = False
        self._frozen: list[_Frozen] = []
        self._fault = fault
        self._from_write = from_write
        self._num_writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        self._num_writes += 1
        if self._num_writes <= self._from_write:
            return self.real.post(peer, copies, notice)
        return self._fault(self, peer, copies, notice)

    def write_fence(self, peer: str, cell: int, value: int) -> Handle:
        if self.fails_fences:
            return _Frozen(Failed("the peer does not answer"))
        return _Frozen(PENDING) if self.freezes_fences else self.real.write_fence(peer, cell, value)

    def heal(self) -> None:
        """Be the real one from here on."""
        self.fails_fences = False
        self._from_write = sys.maxsize

    def frozen(self) -> _Frozen:
        """Return a write that does not end before `thaw`."""
        self._frozen.append(_Frozen(PENDING))
        return self._frozen[-1]

    def thaw(self) -> None:
        """End the frozen writes of parts; a fence that was never written cannot be done."""
        for handle in self._frozen:
            handle.progress = Done(0)

    def poll(self, handle: Handle) -> Progress:
        if isinstance(handle, _Twice):
            return self._poll_both(handle)
        return handle.progress if isinstance(handle, _Frozen) else self.real.poll(handle)

    def _poll_both(self, twice: _Twice) -> Progress:
        first, second = self.real.poll(twice.first), self.real.poll(twice.second)
        return first if isinstance(second, Done) else second

    def release(self, handle: Handle) -> None:
        if isinstance(handle, _Twice):
            self.real.release(handle.first)
            handle = handle.second
        if not isinstance(handle, _Frozen):
            self.real.release(handle)


class WithFault:
    """Wraps each transport that it is given, and remembers them; see `handoff_lab.ring`."""

    def __init__(self, fault: Fault) -> None:
        self.made: list[FaultyTransport] = []
        self._fault = fault

    def __call__(self, real: Transport) -> Transport:
        self.made.append(FaultyTransport(real, self._fault))
        return cast(Transport, self.made[-1])


def drop(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    return _Frozen(Done(0))


def freeze(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    self.freezes_fences = True
    return self.frozen()


def break_link(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    """The transport gives up on the peer: this write and the fence fail; nobody knows what of it is on its way."""
    self.fails_fences = True
    return _Frozen(Failed("the peer does not answer"))


def refuse(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    raise TransferError("no such route")


def truncate(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    last = copies[-1]
    # Not one byte alone: what lay there before may have the same.
    return self.real.post(peer, [*copies[:-1], replace(last, num_bytes=last.num_bytes // 2)], notice)


def misplace(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    """Other bytes land than those that were checked."""
    return self.real.post(peer, [replace(copy, src_offset_bytes=0) for copy in copies], notice)


def repeat(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    return _Twice(self.real.post(peer, copies, notice), self.real.post(peer, copies, notice))


def overtake(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    """The notice comes without the data: bound to a write of one byte of it, so that no page of others is touched."""
    return self.real.post(peer, [replace(copies[0], num_bytes=1)], notice)


def garble(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    return self.real.post(peer, copies, notice[:-1] + bytes([notice[-1] ^ 1]))


def garble_any(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    return self.real.post(peer, copies, notice[::-1])


def mislabel(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    """The notice names another epoch."""
    read = notices.decode(notice)
    other = Notice(replace(read.key, counter=read.key.counter + 1), read.rank, read.part)
    return self.real.post(peer, copies, notices.encode(other))


def claim_other_rank(self: FaultyTransport, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
    read = notices.decode(notice)
    return self.real.post(peer, copies, notices.encode(Notice(read.key, read.rank + 1, read.part)))
