"""The states of a reader's session and every legal way between them.

The diagram in docs/handoff.md is made from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.session_events import Event


class State(Enum):
    RESERVED = "reserved"  # nobody has attached
    ATTACHED = "attached"  # some rank may write, nothing has landed
    RECEIVING = "receiving"  # parts or manifests are coming in
    SEALED = "sealed"  # everything that must arrive is here and right
    ADMITTED = "admitted"  # the scheduler runs on the pages
    RELEASED = "released"  # the scheduler is done; some rank's fence is not in yet
    ABORTING = "aborting"  # given up; waits for the fences of the attached ranks
    QUARANTINED = "quarantined"  # a fence is overdue: the pages are lost until it comes
    FENCED = "fenced"  # nothing can land any more; the pages go back now
    FREE = "free"  # over


_S = State
_GIVEN_UP = {_S.ABORTING, _S.FENCED}
# Which states an event may lead to, by the state it meets. What is not here is illegal.
TRANSITIONS: Mapping[State, Mapping[type[Event], frozenset[State]]] = {
    state: {event: frozenset(targets) for event, targets in row.items()}
    for state, row in {
        _S.RESERVED: {
            ev.Attach: {_S.ATTACHED},
            ev.Claimed: {_S.ADMITTED},
            ev.Abort: {_S.FENCED},
            ev.WriterDead: {_S.FENCED},
            ev.Renew: {_S.RESERVED},
            ev.Tick: {_S.RESERVED, _S.FENCED},
        },
        _S.ATTACHED: {
            ev.Attach: {_S.ATTACHED},
            ev.PartLanded: {_S.RECEIVING, _S.ABORTING},
            ev.ManifestIn: {_S.RECEIVING, _S.SEALED, _S.ABORTING},
            ev.Abort: {_S.ABORTING},
            ev.Fenced: _GIVEN_UP,
            ev.StreamLost: {_S.ABORTING},
            ev.WriterDead: {_S.ABORTING},
            ev.Renew: {_S.ATTACHED},
            ev.Tick: {_S.ATTACHED, _S.ABORTING},
        },
        _S.RECEIVING: {
            ev.Attach: {_S.RECEIVING},
            ev.PartLanded: {_S.RECEIVING, _S.SEALED, *_GIVEN_UP},
            ev.ManifestIn: {_S.RECEIVING, _S.SEALED, *_GIVEN_UP},
            ev.Abort: _GIVEN_UP,
            ev.Fenced: {_S.RECEIVING, *_GIVEN_UP},
            ev.StreamLost: {_S.RECEIVING, _S.ABORTING},
            ev.WriterDead: {_S.ABORTING, _S.FENCED},
            ev.Renew: {_S.RECEIVING},
            ev.Tick: {_S.RECEIVING, *_GIVEN_UP},
        },
        _S.SEALED: {
            ev.Admitted: {_S.ADMITTED},
            ev.Abort: _GIVEN_UP,
            ev.Fenced: {_S.SEALED},
            ev.StreamLost: {_S.SEALED},
            ev.WriterDead: {_S.SEALED},
            ev.Drained: {_S.SEALED},
            ev.Renew: {_S.SEALED},
            ev.Tick: {_S.SEALED, *_GIVEN_UP},
        },
        _S.ADMITTED: {
            ev.Abort: {_S.ADMITTED},
            ev.Released: {_S.RELEASED, _S.FENCED},
            ev.Fenced: {_S.ADMITTED},
            ev.StreamLost: {_S.ADMITTED},
            ev.WriterDead: {_S.ADMITTED},
            ev.Drained: {_S.ADMITTED},
            ev.Tick: {_S.ADMITTED},
        },
        **{
            waiting: {
                ev.Abort: {waiting},
                ev.Fenced: {waiting, _S.FENCED},
                ev.StreamLost: {waiting},
                ev.WriterDead: {waiting},
                ev.Drained: {waiting, _S.FENCED},
                ev.Tick: {waiting, _S.QUARANTINED},
            }
            for waiting in (_S.RELEASED, _S.ABORTING, _S.QUARANTINED)
        },
        _S.FENCED: {ev.Abort: {_S.FENCED}, ev.Freed: {_S.FREE}, ev.Tick: {_S.FENCED}},
        _S.FREE: {ev.Abort: {_S.FREE}, ev.Tick: {_S.FREE}},
    }.items()
}
