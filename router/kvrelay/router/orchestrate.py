"""One request from placement to its last token: reserve, prefill, decode, and what happens when a leg fails.

Both legs share one fate: the first failure cancels the other. A failure that another node might not have is tried
again there, within a budget. Once tokens were sent, the retry is prefill(prompt + sent tokens): the client's stream
goes on where it stopped, with the same seed and positions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import OverloadedError, ServeError, Status, UnavailableError
from kvrelay.core.types import FinishReason, Incarnation, PromptLogprobs, SampledToken, Sampling, Usage
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2, decode_pb2, prefill_pb2
from kvrelay.router.admission import Slo, Terms
from kvrelay.router.attempt import Attempt, Shared, Work
from kvrelay.router.legs import LegFailedError
from kvrelay.router.peers import Placed, Placer
from kvrelay.router.timesplit import RequestTimer

log = logging.getLogger(__name__)

PLACE_AGAIN_S = 2.0  # longest wait of a retry for a node to take it
PLACE_PAUSE_S = 0.1
PROGRESS_S = 2.0  # longest silence towards the client while a prompt is prefilled


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request. `sampling.max_tokens` is at least 1 and fits the model's length."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    packed_ids: bytes  # the same
    sampling: Sampling
    slo: Slo = Slo.STANDARD


@dataclass(frozen=True, slots=True)
class PlacedEvent:
    """The request is let in; sent once, also when it is placed again later."""

    placed: Placed
    is_local: bool = False  # see `Attempt.is_local`


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Log-probabilities of prompt tokens; each position once, in order, all before the first token."""

    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class TokensEvent:
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class EndEvent:
    reason: FinishReason


Event = PlacedEvent | ProgressEvent | PromptEvent | TokensEvent | EndEvent


@dataclass(frozen=True, slots=True)
class Orchestrator:
    """What every request shares."""

    shared: Shared
    placer: Placer
    max_retries: int

    def start(self, job: Job, *, timer: RequestTimer, deadline: Deadline) -> Run:
        return Run(self, job, timer, deadline)


@dataclass(slots=True)
class _Merge:
    """What has come so far in one attempt."""

    first_seen: bool = False
    prefilled_tokens: int = 0
    early: list[SampledToken] = field(default_factory=list)  # decode's tokens that overtook prefill's first one
    decode_reason: FinishReason | None = None
    reason: FinishReason | None = None


class Run:
    """One request on its way. Iterate `events` inside `aclosing`: leaving early aborts both legs."""

    def __init__(self, orchestrator: Orchestrator, job: Job, timer: RequestTimer, deadline: Deadline) -> None:
        self._shared = orchestrator.shared
        self._placer = orchestrator.placer
        self._max_retries = orchestrator.max_retries
        self._job = job
        self._timer = timer
        self._deadline = deadline
        self._sent: list[int] = []
        self._scored_to = 1  # the client has the log-probabilities of the prompt tokens before this position
        self._admitted = False  # the client has its PlacedEvent
        self._cached_tokens = 0
        self._resident_tokens = 0
        self.placed: Placed | None = None  # of the latest attempt
        self.pulled_tokens = 0  # so is this: prefill fetched them from another node
        self.is_local = False  # and this: decode completed the prompt itself

    @property
    def usage(self) -> Usage:
        return Usage(len(self._job.token_ids), self._cached_tokens, self._resident_tokens, len(self._sent))

    async def events(self) -> AsyncGenerator[Event]:
        """Yield what happens, ending with EndEvent.

        Raises:
            ServeError: the request failed and no retry is left; both legs are being aborted.
        """
        avoid: frozenset[Incarnation] = frozenset()
        failure: LegFailedError | None = None
        for attempt in range(1, self._max_retries + 2):
            self._timer.attempt_begins()
            try:
                async with aclosing(self._attempt(attempt, avoid, failure)) as events:
                    async for event in events:
                        yield event
                return
            except LegFailedError as err:
                log.warning("request %s attempt %d failed: %s", self._job.request_id, attempt, err)
                if (reason := self._ended_anyway()) is not None:
                    yield EndEvent(reason)
                    return
                if not err.cause.retry_elsewhere or self._deadline.passed():
                    raise err.cause from err
                failure, avoid = err, avoid | err.culprits
        assert failure is not None
        raise _exhausted(failure, self._max_retries + 1)

    def _ended_anyway(self) -> FinishReason | None:
        """Return why a failed request has nothing left to do: its last token is out, only the word of it got lost."""
        if self._sent and self._sent[-1] in self._job.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._sent) >= self._job.sampling.max_tokens else None

    async def _attempt(
        self, number: int, avoid: frozenset[Incarnation], failure: LegFailedError | None
    ) -> AsyncGenerator[Event]:
        prompt, packed_ids, sampling = self._left()
        ref = common_pb2.RequestRef(request_id=self._job.request_id, attempt=number)
        work = Work(ref, packed_ids, sampling, len(self._sent))
        patience_s = 0.0 if failure is None else PLACE_AGAIN_S
        try:
            placed = await self._place(prompt, sampling.max_tokens, avoid, patience_s=patience_s)
        except ServeError as err:
            raise err if failure is None else _exhausted(failure, number - 1) from err
        self.placed = placed
        self._timer.placed()
        attempt = Attempt(self._shared, placed, work, self._deadline)
        try:
            begun = attempt.begin()
            if begun:
                self._timer.reserved()
                await asyncio.sleep(0)  # it leaves first
            await attempt.reserve()
            if not begun:
                self._timer.reserved()
            self.is_local = attempt.is_local
            if placed.is_local and not attempt.is_local:
                placed.handed_over()
            attempt.start()  # first of all: the nodes work while the client is told
            if not self._admitted:
                self._admitted = True
                yield PlacedEvent(placed, attempt.is_local)
            async with aclosing(self._follow(attempt)) as events:
                async for event in events:
                    yield event
        finally:
            placed.release()
            await attempt.close()

    def _left(self) -> tuple[npt.NDArray[np.int32], bytes, Sampling]:
        """Return what is left to do: the prompt with the tokens that the client has, also packed, and how to go on."""
        job = self._job
        if not self._sent:
            return job.token_ids, job.packed_ids, job.sampling
        prompt = np.concatenate([job.token_ids, np.asarray(self._sent, dtype=np.int32)])
        max_tokens = job.sampling.max_tokens - len(self._sent)
        return prompt, convert.pack_ids(prompt), replace(job.sampling, max_tokens=max_tokens, prompt_logprobs=False)

    async def _place(
        self, prompt: npt.NDArray[np.int32], max_tokens: int, avoid: frozenset[Incarnation], *, patience_s: float
    ) -> Placed:
        """Choose nodes. A client that has heard of its request cannot send it again, so a retry waits for `patience_s`:
        in a rolling restart the next node may drain just before the registry's news of the last one get here."""
        terms = None if self._admitted else Terms(self._job.slo, self._deadline.remaining_s())
        until_s = self._timer.clock() + min(patience_s, self._deadline.remaining_s())
        while True:
            try:
                return await self._placer.place(
                    token_ids=prompt, max_tokens=max_tokens, needs_decode=max_tokens > 1, avoid=avoid, terms=terms
                )
            except OverloadedError:
                raise
            except UnavailableError:
                if self._timer.clock() >= until_s:
                    raise
            await asyncio.sleep(PLACE_PAUSE_S)

    async def _follow(self, attempt: Attempt) -> AsyncGenerator[Event]:
        """Merge the legs: progress, the first token from prefill, the others from decode, in this order."""
        merge = _Merge()
        while merge.reason is None:
            message = await attempt.next(PROGRESS_S)
            if isinstance(message, prefill_pb2.PrefillEvent):
                for event in self._on_prefill(merge, message):
                    yield event
            elif message is not None:
                for event in self._on_decode(merge, attempt, message):
                    yield event
            else:
                attempt.check_not_ended(first_token_came=merge.first_seen)
                if not merge.first_seen:
                    yield ProgressEvent(merge.prefilled_tokens)
        attempt.finished = True
        yield EndEvent(merge.reason)

    def _on_prefill(self, merge: _Merge, message: prefill_pb2.PrefillEvent) -> Iterator[Event]:
        kind = message.WhichOneof("event")
        if kind == "started":
            merge.prefilled_tokens = message.started.cached_tokens
            self.pulled_tokens = message.started.pulled_tokens
            source = None if self.placed is None else self.placed.pull_from
            # What was there already, or what another request brought, was not asked of the source.
            if self.placed and source and not self.pulled_tokens and message.started.cached_tokens < source.tokens:
                self.placed.not_pulled()
            elif self.placed:
                self.placed.begun()
            if not self._sent:
                self._cached_tokens = message.started.cached_tokens
        elif kind == "progress":
            merge.prefilled_tokens = message.progress.prefilled_tokens
            yield ProgressEvent(merge.prefilled_tokens)
        elif kind == "prompt_logprobs":
            scored = convert.prompt_logprobs_from_pb(message.prompt_logprobs).since(self._scored_to)
            if scored.logprobs:  # else an earlier attempt came as far
                self._scored_to = scored.end
                yield PromptEvent(scored)
        elif kind == "first_token":
            if not self._sent:
                self._timer.prefill_ms = message.first_token.prefill_ms
                self._timer.compute_ms = message.first_token.compute_ms
            merge.first_seen = True
            merge.reason = convert.finish_from_pb(message.first_token.finish_reason) or merge.decode_reason
            yield self._send([convert.sampled_from_pb(message.first_token.token), *merge.early])

    def _on_decode(self, merge: _Merge, attempt: Attempt, message: decode_pb2.DecodeEvent) -> Iterator[Event]:
        kind = message.WhichOneof("event")
        if kind == "admitted":
            self._note_admission(attempt, message.admitted)
        elif kind == "first":
            if not self._sent:
                self._timer.prefill_ms = message.first.prefill_ms
            merge.first_seen = True
            yield self._send([convert.sampled_from_pb(message.first.token)])
        elif kind == "tokens":
            tokens = [convert.sampled_from_pb(token) for token in message.tokens.tokens]
            if merge.first_seen:
                yield self._send(tokens)
            else:
                merge.early += tokens
        elif kind == "done":
            merge.decode_reason = convert.finish_from_pb(message.done.reason)
            if not attempt.num_sent:
                self._timer.decode_step_ms = message.done.first_step_ms
            attempt.decode_finished = True
        if merge.first_seen and merge.decode_reason is not None:
            merge.reason = merge.decode_reason

    def _send(self, tokens: list[SampledToken]) -> TokensEvent:
        self._sent += [token.token_id for token in tokens]
        self._timer.tokens_left(len(tokens))
        return TokensEvent(tuple(tokens))

    def _note_admission(self, attempt: Attempt, admitted: decode_pb2.DecodeAdmitted) -> None:
        attempt.decode_admitted()
        if attempt.is_local and not self._sent:
            self._cached_tokens = admitted.resident_tokens
        if len(self._sent) <= 1:
            self._resident_tokens = admitted.resident_tokens
            self._timer.exposed_relay_ms = admitted.exposed_relay_ms
            self._timer.verify_ms = admitted.verify_ms
            self._timer.admit_ms = admitted.admit_ms


def _exhausted(failure: LegFailedError, num_attempts: int) -> ServeError:
    if failure.cause.status is Status.RESOURCE_EXHAUSTED:
        return failure.cause
    return UnavailableError(f"{failure.cause} (after {num_attempts} attempts)")
