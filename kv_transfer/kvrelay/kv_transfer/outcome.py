"""How a hand-off ends for the rank that writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settled:
    """Everything was verified and the request admitted."""

    relayed_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The hand-off ended without admission."""

    reason: str
    stuck: bool = False  # the peer neither takes our writes nor fails them: only a new incarnation helps


Outcome = Settled | Failed
