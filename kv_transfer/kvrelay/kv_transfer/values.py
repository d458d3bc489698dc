"""Values that both sides of a hand-off speak about. Frozen; messages are converted at the edge (wire.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvrelay.core.shard import Span
from kvrelay.core.types import Epoch, Incarnation, SampledToken

# A fence cell is found by fence_slot * MAX_RING_SIZE + rank, so both sides must agree on this number.
MAX_RING_SIZE = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One of the router's tries of a request."""

    request_id: str
    attempt: int  # from 1


class ChecksumKind(Enum):
    """How the bytes of a part are summed; decode says which, in the ticket."""

    XXH3 = "xxh3"  # xxh3-64: at memory speed on a CPU
    WORDS = "words"  # kernels/checksum.py: at memory speed on a GPU


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of writing: one layer, one token range, one writer rank."""

    part_id: int  # counts the parts of one rank in one epoch, from 0
    layer: int
    tokens: Span
    checksum: int  # of the rows in token order


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank has written, in full. Its arrival says nothing about the data's."""

    rank: int
    parts: tuple[Part, ...]
    first_token: SampledToken | None = None  # from rank 0 only
    cached_tokens: int = 0  # from rank 0 only


class FenceProof(Enum):
    """Why no write of a rank under an epoch can still land."""

    HANDLES_DONE = "handles_done"  # every handle was seen DONE
    CELL_WRITTEN = "cell_written"  # posting stopped, then a write to the fence cell was seen DONE
    NOTHING_POSTED = "nothing_posted"
    LINK_CLOSED = "link_closed"  # the link has ended, and the receiver has drained what came before; see link_end.py
    KNOWN_DEAD = "known_dead"  # the writer is gone, and the receiver has drained what it had in its sockets


@dataclass(frozen=True, slots=True)
class Reservation:
    """What decode's Reserve fixes for one epoch."""

    epoch: Epoch
    request: Request
    writer: Incarnation  # the only node that may write
    ring_size: int
    pages: tuple[int, ...]  # in token order, covering the prompt
    resident_tokens: int  # [0, resident_tokens) are here already
    prompt_tokens: int
    num_layers: int
    row_bytes: int
    fingerprint: bytes
    one_time_token: bytes
    wants_token: bool = True  # rank 0's manifest brings the first token; else only latents are handed over

    @property
    def relayed_tokens(self) -> Span:
        """The positions that must be written, in every layer."""
        return Span(self.resident_tokens, self.prompt_tokens)
