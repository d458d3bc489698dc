"""A Prefill call inside the node: what is asked, in which phase it is, and what rank 0's decisions say of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Sampling
from kvrelay.proto.v1 import common_pb2, handoff_pb2


def job_key(ref: common_pb2.RequestRef) -> str:
    """Return the name of one attempt inside the ring; an older attempt may still be closing under its own."""
    return f"{ref.request_id}#{ref.attempt}"


@dataclass(frozen=True, slots=True)
class Job:
    """One Prefill call, validated. Filled by the servicer."""

    request: common_pb2.RequestRef
    prompt_T: npt.NDArray[np.int32]
    sampling: Sampling
    num_sent_tokens: int = 0
    block_hashes: tuple[bytes, ...] = ()  # empty: neither publishes nor uses cached blocks
    ticket: handoff_pb2.Ticket | None = None
    ticket_follows: bool = False  # it comes while the prompt is computed

    @property
    def usable_hashes(self) -> tuple[bytes, ...]:
        """Blocks that may come from the cache; it has no logits, so none when those of the prompt are wanted."""
        return () if self.sampling.prompt_logprobs else self.block_hashes

    @property
    def key(self) -> str:
        return job_key(self.request)

    @property
    def prompt_tokens(self) -> int:
        return int(self.prompt_T.shape[0])

    @property
    def relayed_tokens(self) -> int:
        """Of the prompt, those that decode lacks and has been promised."""
        resident = self.prompt_tokens if self.ticket is None else self.ticket.resident_tokens
        return self.prompt_tokens - min(resident, self.prompt_tokens)


class Phase(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    SEALING = "sealing"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class Opened:
    """The first chunk of a job is about to run."""

    key: str
    cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    """All rows of prompt positions [0, tokens) exist."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """All pages of a job are back."""

    key: str


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Blocks that are now cached on this node, and blocks that no longer are; the same of its host memory."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    host_added: tuple[bytes, ...] = ()
    host_removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class FillEnded:
    """What was to be fetched is cached now, or is given up."""

    key: str
    num_tokens: int = 0  # that came
    reason: str | None = None  # why it failed; with none and no tokens, nothing was to be fetched


Event = Opened | Computed | HandoffFailed | Gone | CacheChanged | FillEnded
