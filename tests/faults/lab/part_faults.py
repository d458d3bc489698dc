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

    post: Callable[[], Handle]
    at_s: float
    handle: Handle | None = None


class LabTransport(faulty.FaultyTransport):
    """The real transport, except for the parts that a rule strikes.

    Further kinds: `delay` posts a part `seconds` later (later parts overtake it), `slow` makes posting it take so long.
    """

    def __init__(self, real: Transport, board: Switchboard) -> None:
        super().__init__(real, lambda *_: None)
        self._board = board

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        rule = self._board.ask("part")
        if rule is None:
            return self.real.post(peer, copies, notice)
        if rule.kind == "slow":
            time.sleep(rule.seconds)
            return self.real.post(peer, copies, notice)
        if rule.kind == "delay":
            return _Late(lambda: self.real.post(peer, copies, notice), time.monotonic() + rule.seconds)
        return KINDS[rule.kind](self, peer, copies, notice)

    def poll(self, handle: Handle) -> Progress:
        if isinstance(handle, _Late):
            if handle.handle is None:
                if time.monotonic() < handle.at_s and self._board.armed("part"):
                    return PENDING
                handle.handle = handle.post()
            return self.real.poll(handle.handle)
        return super().poll(handle)

    def release(self, handle: Handle) -> None:
        super().release(handle.handle if isinstance(handle, _Late) else handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
