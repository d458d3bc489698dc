"""The states, events and actions of a writer session, and every legal way between the states.

The diagram in docs/handoff.md is made from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvrelay.core.types import SampledToken
from kvrelay.kv_transfer.values import FenceProof, Manifest, Part


class WriterState(Enum):
    PENDING = "pending"  # decode has not said yes; parts wait
    ATTACHED = "attached"  # it has; nothing was posted
    POSTING = "posting"
    SEALING = "sealing"  # the manifest is out; waits for the handles and for the admission
    SETTLED = "settled"  # admitted, and every handle is DONE
    ABORTING = "aborting"  # given up; the fence is on its way
    FENCED = "fenced"  # given up, and nothing of ours can land any more
    LOST = "lost"  # given up, and no fence is possible: the peer is gone
    STUCK = "stuck"  # given up, and the peer neither takes our writes nor fails them


@dataclass(frozen=True, slots=True)
class Attached:
    """Decode says yes."""


@dataclass(frozen=True, slots=True)
class AddPart:
    """A part's bytes are final."""

    part: Part


@dataclass(frozen=True, slots=True)
class Seal:
    """No more parts."""

    first_token: SampledToken | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A write could not be posted or ended in an error."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Posting is over, and every handle has ended, DONE or failed."""


@dataclass(frozen=True, slots=True)
class FenceDone:
    proof: FenceProof


@dataclass(frozen=True, slots=True)
class FenceFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Decode has verified everything."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This rank or decode ends it."""

    reason: str
    tell_reader: bool  # False when it was the reader who said so


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The Attach stream is gone: nothing can be told any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


WriterEvent = (
    Attached | AddPart | Seal | WriteFailed | Drained | FenceDone | FenceFailed | Admitted | GiveUp | StreamLost | Tick
)


@dataclass(frozen=True, slots=True)
class Post:
    part: Part


@dataclass(frozen=True, slots=True)
class Finish:
    """Report Drained once every handle has ended."""


@dataclass(frozen=True, slots=True)
class StopAndFence:
    """Post nothing more, then prove it: report FenceDone or FenceFailed, and Drained."""


@dataclass(frozen=True, slots=True)
class SendManifest:
    parts: tuple[Part, ...]
    first_token: SampledToken | None
    cached_tokens: int

    def of_rank(self, rank: int) -> Manifest:
        return Manifest(rank, self.parts, self.first_token, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class SendAbort:
    reason: str


@dataclass(frozen=True, slots=True)
class SendFenced:
    proof: FenceProof


@dataclass(frozen=True, slots=True)
class FreeSources:
    """No write can read our pages any more."""


@dataclass(frozen=True, slots=True)
class Settle:
    """It worked."""


@dataclass(frozen=True, slots=True)
class Fail:
    reason: str
    stuck: bool = False


WriterAction = Post | Finish | StopAndFence | SendManifest | SendAbort | SendFenced | FreeSources | Settle | Fail

_W = WriterState
_Row = Mapping[type[WriterEvent], set[WriterState]]


def _ended(state: WriterState) -> _Row:
    """Return the row of a terminal state: the step thread and the transfer may still be talking; nothing changes."""
    late = (AddPart, Seal, WriteFailed, Drained, FenceDone, FenceFailed, Admitted, GiveUp, StreamLost, Tick)
    return {event: {state} for event in late}


_ROWS: Mapping[WriterState, _Row] = {
    _W.PENDING: {
        Attached: {_W.ATTACHED, _W.POSTING, _W.SEALING},
        AddPart: {_W.PENDING},
        Seal: {_W.PENDING},
        GiveUp: {_W.FENCED},
        StreamLost: {_W.FENCED},
        Tick: {_W.PENDING, _W.FENCED},
    },
    _W.ATTACHED: {
        AddPart: {_W.POSTING},
        Seal: {_W.SEALING},
        GiveUp: {_W.FENCED},
        StreamLost: {_W.FENCED},
        Tick: {_W.ATTACHED, _W.FENCED},
    },
    _W.POSTING: {
        AddPart: {_W.POSTING},
        Seal: {_W.SEALING},
        WriteFailed: {_W.ABORTING},
        GiveUp: {_W.ABORTING},
        StreamLost: {_W.ABORTING},
        Tick: {_W.POSTING, _W.ABORTING},
    },
    _W.SEALING: {
        WriteFailed: {_W.ABORTING},
        Drained: {_W.SEALING, _W.SETTLED},
        Admitted: {_W.SEALING, _W.SETTLED},
        GiveUp: {_W.ABORTING, _W.FENCED},
        StreamLost: {_W.ABORTING, _W.FENCED},
        Tick: {_W.SEALING, _W.ABORTING, _W.FENCED},
    },
    _W.ABORTING: {
        AddPart: {_W.ABORTING},
        Seal: {_W.ABORTING},
        WriteFailed: {_W.ABORTING},
        Drained: {_W.ABORTING},
        FenceDone: {_W.FENCED},
        FenceFailed: {_W.LOST},
        Admitted: {_W.ABORTING},
        GiveUp: {_W.ABORTING},
        StreamLost: {_W.ABORTING},
        Tick: {_W.ABORTING, _W.STUCK},
    },
    _W.SETTLED: {event: {_W.SETTLED} for event in (GiveUp, StreamLost, Tick)},
    **{state: _ended(state) for state in (_W.FENCED, _W.LOST, _W.STUCK)},
}
# Which states an event may lead to, by the state it meets. What is not here is illegal.
WRITER_TRANSITIONS: Mapping[WriterState, Mapping[type[WriterEvent], frozenset[WriterState]]] = {
    state: {event: frozenset(targets) for event, targets in row.items()} for state, row in _ROWS.items()
}
