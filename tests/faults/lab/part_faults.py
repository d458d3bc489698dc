"""A node's transport with a fault point in it: `part`, passed by every write of a part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import faulty_transport as faulty
from faults.lab.switchboard import Switchboard
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import PENDING, Handle, Progress, Transport

KINDS: dict[str, faulty.Fault] = {
    "drop": faulty.drop,
    "duplicate": faulty.repeat,
    "corrupt": faulty.misplace,
    "truncate": faulty.truncate,
    "refuse": faulty.refuse,
    "overtake": faulty.overtake,
    "garble": faulty.garble,
    "mislabel": faulty.mislabel,
    "wrong_rank": faulty.claim_other_rank,
}


@dataclass(slots=True)
class _Late:
    """A write that is posted some time after it was asked for."""

    peer: str
    post: Callable[[], Handle]
    at_s: float
    handle: Handle | None = None

    def leave(self) -> Handle:
        if self.handle is None:
            self.handle = self.post()
        return self.handle


class LabTransport(faulty.FaultyTransport):
    """The real transport, except for the parts that a rule strikes.

    Further kinds: `delay` posts a part `seconds` later (later parts overtake it), `slow` makes posting it take so long.
    A fence overtakes nothing: that writes of one agent to one peer land before a later fence is what a transport must
    keep, and what the product rests on, so a delayed part leaves at the latest when its fence does.
    """

    def __init__(self, real: Transport, board: Switchboard) -> None:
        super().__init__(real, lambda *_: None)
        self._board = board
        self._late: list[_Late] = []

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        rule = self._board.ask("part")
        if rule is None:
            return self.real.post(peer, copies, notice)
        if rule.kind == "slow":
            time.sleep(rule.seconds)
            return self.real.post(peer, copies, notice)
        if rule.kind == "delay":
            late = _Late(peer, lambda: self.real.post(peer, copies, notice), time.monotonic() + rule.seconds)
            self._late.append(late)
            return late
        return KINDS[rule.kind](self, peer, copies, notice)

    def write_fence(self, peer: str, cell: int, value: int) -> Handle:
        for late in self._late:
            if late.peer == peer:
                late.leave()
        return super().write_fence(peer, cell, value)

    def poll(self, handle: Handle) -> Progress:
        if not isinstance(handle, _Late):
            return super().poll(handle)
        if handle.handle is None and time.monotonic() < handle.at_s and self._board.armed("part"):
            return PENDING
        return self.real.poll(handle.leave())

    def release(self, handle: Handle) -> None:
        if isinstance(handle, _Late):
            self._late.remove(handle)
            handle = handle.handle
        if handle is not None:
            super().release(handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
