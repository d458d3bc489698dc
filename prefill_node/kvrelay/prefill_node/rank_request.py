"""What one rank remembers of a request, and the ends of hand-offs and fetches as its step thread sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvrelay.prefill_node.chunk_work import ChunkWork
from kvrelay.prefill_node.late_relay import LateRelay
from kvrelay.prefill_node.relay import PartWriter, Relay
from kvrelay.prefill_node.ring_plan import PageTable
from kvrelay.proto.v1 import ring_pb2


class Writer(PartWriter, Protocol):
    """One rank's end of one hand-off, as the step thread sees it."""

    def abort(self, reason: str) -> None: ...

    @property
    def failure(self) -> str | None:
        """Why the hand-off failed; None while it has not."""
        ...

    @property
    def settled(self) -> bool:
        """The reader has admitted the request."""
        ...

    @property
    def sources_free(self) -> bool:
        """No write can read this rank's pages any more."""
        ...


@dataclass(slots=True)
class RankRequest:
    """Owned by `RankWorker`."""

    key: str
    prompt_tokens: int
    cached_tokens: int
    table: PageTable
    wants_logprobs: bool = False
    is_push: bool = False  # of cached blocks, to another prefill node
    writer: Writer | None = None
    relay: Relay | LateRelay | None = None
    failure_told: bool = False
    settled_told: bool = False
    closing: bool = False
    last_chunk: int = 0  # as the device's queue counts them
    paused: ChunkWork | None = None  # that was left between two layers


class Fetcher(Protocol):
    """One rank's part of fetches, as the step thread sees it."""

    def obey(self, step: ring_pb2.RingStep) -> None:
        """Begin and end what a step says."""
        ...

    def report(self, report: ring_pb2.RankReport) -> None:
        """Put into a report what came of it since the last one."""
        ...
