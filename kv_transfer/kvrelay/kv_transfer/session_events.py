"""What can happen to a reader's session, and what it asks its owner to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.values import FenceProof, Manifest, Part, Request

# ---- events ----


@dataclass(frozen=True, slots=True)
class Attach:
    """A rank asks for permission to write."""

    rank: int
    writer: Incarnation
    request: Request
    one_time_token: bytes
    fingerprint: bytes
    stream_id: bytes = b""


@dataclass(frozen=True, slots=True)
class PartLanded:
    """The notification bound to a part's WRITE is in, and its bytes were compared with its checksum."""

    rank: int
    part: Part
    verified: bool
    landed_at_s: float
    verified_at_s: float


@dataclass(frozen=True, slots=True)
class ManifestIn:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Admitted:
    """The scheduler took the request."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The scheduler took the request and fills the pages itself: nobody may attach."""


@dataclass(frozen=True, slots=True)
class Released:
    """The scheduler is done with the pages."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The router, the servicer, the scheduler or a rank gives up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """A rank says that none of its writes can land any more."""

    rank: int
    proof: FenceProof


@dataclass(frozen=True, slots=True)
class StreamLost:
    """A rank's Attach stream ended before its fence."""

    rank: int


@dataclass(frozen=True, slots=True)
class WriterDead:
    """The writer incarnation is known to be gone; what it sent may still sit in our sockets."""

    why: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The transfer thread has polled long enough since the writer died."""


@dataclass(frozen=True, slots=True)
class Freed:
    """The pages are back with their allocator."""


@dataclass(frozen=True, slots=True)
class Renew:
    """The holder is alive."""

    lease_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    caught_up_s: float = math.inf  # all that had landed by then was reported; inf = by now


Event = (
    Attach
    | PartLanded
    | ManifestIn
    | Admitted
    | Claimed
    | Released
    | Abort
    | Fenced
    | StreamLost
    | WriterDead
    | Drained
    | Freed
    | Renew
    | Tick
)

# ---- actions, to be done in order ----


@dataclass(frozen=True, slots=True)
class SendAttached:
    rank: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Hand the request to the scheduler, then report Admitted (or Abort)."""


@dataclass(frozen=True, slots=True)
class SendAdmitted:
    rank: int


@dataclass(frozen=True, slots=True)
class SendAbort:
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the holder that the request ends here. The pages come back later, by FreePages."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the transfer thread poll, then report Drained."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The pages stay away from the allocator until a proof comes."""


@dataclass(frozen=True, slots=True)
class FreePages:
    """Give the pages back, then report Freed."""


@dataclass(frozen=True, slots=True)
class SendClosed:
    rank: int


Action = SendAttached | Admit | SendAdmitted | SendAbort | Fail | Drain | Quarantine | FreePages | SendClosed
