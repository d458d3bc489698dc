"""One request on a decode node, from Reserve to its last token, as the asyncio thread sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvrelay.core import prefix_hash
from kvrelay.core.errors import ServeError
from kvrelay.core.types import Epoch, FinishReason, Incarnation, SampledToken, Sampling
from kvrelay.decode_node.engine import SequenceState
from kvrelay.decode_node.scheduler import Sequence
from kvrelay.kv_transfer.hub_values import AdmittedHandoff
from kvrelay.kv_transfer.values import Request
from kvrelay.model.sampler import SamplerState


@dataclass(frozen=True, slots=True)
class Ask:
    """What a router wants reserved. Filled by the servicer."""

    request: Request
    node: Incarnation  # the incarnation the router chose
    holder: Incarnation  # who renews the lease
    writer: Incarnation  # the only node that may write
    ring_size: int
    prompt_T: npt.NDArray[np.int32]  # output that was sent before a retry included
    num_sent_tokens: int
    sampling: Sampling
    fingerprint: bytes
    prefix_seed: bytes
    timeout_s: float
    may_compute: bool = False  # what is missing may be computed here, when it is little


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request joined the running batch."""

    handoff: AdmittedHandoff | None  # None: the rest of the prompt is computed here
    resident_tokens: int
    admit_s: float  # from verified until in the batch


@dataclass(frozen=True, slots=True)
class First:
    """The first token of a request whose prompt was completed here."""

    token: SampledToken
    prefill_s: float  # from Reserve
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    reason: FinishReason
    step_s: float  # mean
    first_step_s: float
    num_tokens: int


Event = Admitted | First | SampledToken | Done | ServeError


class NodeCrashedError(ServeError):
    """A bug ended a thread of the node; the process is about to exit."""

    retry_elsewhere = True


class Phase(Enum):
    WAITING = "waiting"  # pages are reserved, latents arrive
    RUNNING = "running"  # the step thread uses the pages
    LEAVING = "leaving"  # given up, but the step thread may still use the pages
    OVER = "over"  # kept until its stream has been told


@dataclass(slots=True)
class Record:
    """State of one epoch. Owned by the asyncio thread."""

    epoch: Epoch
    ask: Ask
    max_tokens: int  # to generate, the first token included
    pages: tuple[int, ...]  # in token order, for prompt and output
    resident_tokens: int
    hashes: list[bytes] | None  # of the prompt's full blocks; None: neither uses nor fills the cache
    deadline_s: float
    renewed_s: float  # last sign of life of the holder
    began_s: float = 0.0
    computes: int = 0  # prompt tokens that are computed here; 0: they are handed over
    phase: Phase = Phase.WAITING
    has_stream: bool = False
    error: ServeError | None = None  # why we gave up
    state: SequenceState | None = None  # of its steps, once it is prepared
    handoff: AdmittedHandoff | None = None  # once everything has landed
    output: list[int] = field(default_factory=list)  # the first token included
    num_steps: int = 0
    steps_s: float = 0.0
    first_step_s: float = 0.0
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    @property
    def key(self) -> int:
        return self.epoch.counter

    @property
    def prompt_tokens(self) -> int:
        return int(self.ask.prompt_T.shape[0])

    @property
    def is_active(self) -> bool:
        return self.phase is not Phase.OVER

    @property
    def finish_of_first(self) -> FinishReason | None:
        """Why the request ends with its first token, if it does."""
        if self.output[0] in self.ask.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.max_tokens == 1 else None

    def sequence(self, *, first_token: int | None) -> Sequence:
        """Return the request as the scheduler takes it, behind its first token or, with None, before it."""
        num_chosen = int(first_token is not None)
        return Sequence(
            self.key,
            position=self.prompt_tokens - 1 + num_chosen,
            last_token=int(self.ask.prompt_T[-1]) if first_token is None else first_token,
            tokens_left=self.max_tokens - num_chosen,
            stop_ids=frozenset(self.ask.sampling.stop_token_ids),
        )

    def sampler(self) -> SamplerState:
        return SamplerState(self.ask.sampling, self.ask.prompt_T, self.ask.num_sent_tokens)

    def done(self, reason: FinishReason) -> Done:
        return Done(reason, self.steps_s / max(self.num_steps, 1), self.first_step_s, self.num_steps)

    def admitted(self, at_s: float) -> Admitted:
        assert self.handoff is not None, f"{self.epoch} was not handed over"
        return Admitted(self.handoff, self.resident_tokens, at_s - self.handoff.sealed_at_s)

    def written_hashes(self, block_tokens: int) -> list[bytes]:
        """Return the names of all full blocks whose rows are written: of the prompt and of the fed-back output."""
        if self.hashes is None:
            return []
        fed = np.array(self.output[: self.num_steps], dtype=np.int32)
        start = len(self.hashes) * block_tokens
        parent = self.hashes[-1] if self.hashes else self.ask.prefix_seed
        rest_T = np.concatenate((self.ask.prompt_T[start:], fed))
        return self.hashes + prefix_hash.chain(parent, rest_T, block_tokens=block_tokens)
