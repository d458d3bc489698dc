"""The gRPC edge for clients: translate, delegate, translate."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from grpc import aio

from kvrelay.core import tracing
from kvrelay.core.clock import Deadline
from kvrelay.core.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ServeError,
    Status,
    UnavailableError,
)
from kvrelay.core.grpc_status import grpc_status
from kvrelay.core.types import FinishReason
from kvrelay.proto.v1 import inference_pb2 as pb
from kvrelay.proto.v1 import inference_pb2_grpc
from kvrelay.router.admission import Slo
from kvrelay.router.fleet import FleetView
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.model_files import ModelFiles
from kvrelay.router.orchestrate import (
    EndEvent,
    Job,
    Orchestrator,
    PlacedEvent,
    ProgressEvent,
    PromptEvent,
    Run,
    TokensEvent,
)
from kvrelay.router.output import Output
from kvrelay.router.placer import IndexPlacer
from kvrelay.router.quota import QuotaBooks
from kvrelay.router.settings import RouterSettings
from kvrelay.router.stream import ClientStream, placement_to_pb
from kvrelay.router.tenants import calling
from kvrelay.router.timesplit import RequestTimer
from kvrelay.router.tokenizer import PromptTokenizer
from kvrelay.router.validation import Limits, ValidRequest, check_model, read_packed_ids, service_class, validate

_POLL_S = 0.02
_MOMENT_S, _MOST_MOMENTS = 0.2, 10  # the last words of refused calls leave meanwhile

Ids = npt.NDArray[np.uint32] | npt.NDArray[np.int32]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves clients; knows how many requests are in work."""

    def __init__(
        self,
        settings: RouterSettings,
        files: ModelFiles,
        fleet: FleetView,
        placer: IndexPlacer,
        orchestrator: Orchestrator,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._files = files
        self._tokenizer = PromptTokenizer(files)
        self._fleet = fleet
        self._placer = placer
        self._orchestrator = orchestrator
        self._metrics = metrics
        self._quotas = QuotaBooks()
        self.num_active = 0
        self._num_calls = 0  # ever
        self._is_closed = False

    async def Generate(  # type: ignore[override]  # events are written, so that one task owns the request and its time
        self, request: pb.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        timer = RequestTimer()
        left_s = context.time_remaining()
        limit_s = self._settings.max_request_s if left_s is None else left_s
        self.num_active += 1
        self._num_calls += 1
        status = Status.UNKNOWN.name
        try:
            async with grpc_status(context):
                try:
                    if self._is_closed:
                        raise UnavailableError("this router is stopping; another one may serve the request")
                    async with asyncio.timeout(limit_s), self._traced(context):
                        slo = service_class(request.service_class)
                        valid = await self._let_in(request, timer)
                        with self._charged(valid) as output:
                            await self._run(valid, slo, context, timer, Deadline.after(limit_s), output)
                        status = "ok"
                except TimeoutError as err:
                    status = Status.DEADLINE_EXCEEDED.name
                    raise DeadlineError(f"the request did not end within its {limit_s:.3g} s") from err
                except ServeError as err:
                    status = err.status.name
                    raise
        except asyncio.CancelledError:
            status = Status.CANCELLED.name
            raise
        finally:
            self.num_active -= 1
            self._metrics.ended(status)

    @asynccontextmanager
    async def _traced(self, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        """Give the request its id, and a place in its caller's trace."""
        parent = tracing.incoming(context.invocation_metadata())
        with tracing.span("generate", of=secrets.token_hex(8), parent=parent):
            yield

    def close(self) -> None:
        """Refuse requests that come from now on, before anything is done for them."""
        self._is_closed = True

    async def quiet(self, *, drain_s: float) -> None:
        """Wait until no request runs, but at most `drain_s`; then until none has come for a moment, also in bounds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.num_active:  # noqa: ASYNC110 - polled once, at the end of the process
                    await asyncio.sleep(_POLL_S)
        for _ in range(_MOST_MOMENTS):
            seen = self._num_calls
            await asyncio.sleep(_MOMENT_S)
            if seen == self._num_calls:
                return

    async def ModelInfo(
        self, request: pb.ModelInfoRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.ModelInfoReply:
        nodes, limits = self._fleet.nodes(), self._limits()
        return pb.ModelInfoReply(
            model=limits.model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            max_message_bytes=self._settings.max_message_bytes,
            block_tokens=nodes[0].block_tokens if nodes else 0,
            dtype=nodes[0].dtype if nodes else "",
            eos_token_ids=limits.eos_token_ids,
            has_tokenizer=limits.has_tokenizer,
            has_chat_template=self._tokenizer.has_chat_template,
        )

    async def _let_in(self, request: pb.GenerateRequest, timer: RequestTimer) -> ValidRequest:
        """Return a request that can be served now.

        Raises:
            UnknownModelError, InvalidRequestError: it never can.
            UnavailableError: the fleet lacks something to serve any request.
        """
        limits = self._limits()
        check_model(request.model, limits)
        began_s = timer.clock()
        ids_T, packed_ids = await self._ids(request, limits.max_model_len)
        valid = validate(ids_T, request.sampling, limits, packed_ids=packed_ids)
        timer.tokenize_ms = (timer.clock() - began_s) * 1000
        if missing := self._fleet.service().missing:
            raise UnavailableError(f"model {limits.model!r} cannot be served now: {missing}")
        return valid

    async def _run(
        self,
        valid: ValidRequest,
        slo: Slo,
        context: aio.ServicerContext[Any, Any],
        timer: RequestTimer,
        deadline: Deadline,
        output: Output,
    ) -> None:
        job = Job(tracing.request_id.get(), valid.prompt_T, valid.packed_ids, valid.sampling, slo)
        stream = ClientStream(job.request_id, valid.prompt_tokens, output, context.write)
        run = self._orchestrator.start(job, timer=timer, deadline=deadline)
        reason = await self._follow(run, stream, seed=valid.sampling.seed)
        assert run.placed is not None, "a request that ran has a place"
        await stream.tokens(output.finish())
        at_prefill = len(output.token_ids) == 1 and not run.is_local
        usage = replace(run.usage, completion_tokens=len(output.token_ids))
        placement = placement_to_pb(run.placed, with_decode=not at_prefill, is_local=run.is_local)
        time = timer.split()
        self._metrics.finished(time, usage, pulled_tokens=run.pulled_tokens)
        await stream.finished(reason, placement, usage, time)

    @contextmanager
    def _charged(self, valid: ValidRequest) -> Iterator[Output]:
        """Charge a request to its tenant while it runs; what its output does not use is given back.

        Raises:
            QuotaError: the tenant has as much as it may have.
        """
        output = Output(
            self._files.tokenizer, stop_token_ids=valid.sampling.stop_token_ids, stop_strings=valid.stop_strings
        )
        charge = self._quotas.enter(
            calling.get(), prompt_tokens=valid.prompt_tokens, max_tokens=valid.sampling.max_tokens
        )
        try:
            yield output
        except OverloadedError:  # nothing was done for it
            self._quotas.settle(charge, used_tokens=0)
            raise
        finally:
            self._quotas.settle(charge, used_tokens=valid.prompt_tokens + len(output.token_ids))

    async def _follow(self, run: Run, stream: ClientStream, *, seed: int) -> FinishReason:
        """Pass on events until the end, or a stop string: leaving early ends both legs."""
        pace, computed = self._metrics.pace(), None
        async with aclosing(run.events()) as events:
            async for event in events:
                if isinstance(event, PlacedEvent):
                    self._metrics.placed(event.placed.confidence, way="local" if event.is_local else "handed_over")
                    self._placer.named(event.placed, stream.request_id)
                    await stream.accepted(event.placed, seed=seed, is_local=event.is_local)
                elif isinstance(event, ProgressEvent):
                    if not stream.output.token_ids:  # else a retry goes on behind tokens that the client has
                        await stream.progress(event.prefilled_tokens)
                elif isinstance(event, PromptEvent):
                    await stream.prompt_logprobs(event.logprobs)
                elif isinstance(event, TokensEvent):
                    assert run.placed is not None, "tokens come from nodes"
                    pace.tokens(len(event.tokens))
                    if run.placed is not computed:
                        computed = run.placed
                        asyncio.get_running_loop().call_soon(self._placer.computed, computed)  # the token leaves first
                    await stream.tokens(stream.output.take(event.tokens))
                    if stream.output.stopped:
                        return FinishReason.STOP
                elif isinstance(event, EndEvent):
                    return event.reason
        raise AssertionError("events end with EndEvent or an error")

    def _limits(self) -> Limits:
        served = self._fleet.service().max_model_len or self._files.max_position_embeddings
        own = self._settings.max_model_len
        return Limits(
            model=self._files.name,
            vocab_size=self._files.vocab_size,
            max_model_len=min(served, own) if own else served,
            eos_token_ids=self._files.eos_token_ids,
            has_tokenizer=self._files.tokenizer is not None,
        )

    async def _ids(self, request: pb.GenerateRequest, max_tokens: int) -> tuple[Ids, bytes | None]:
        """Return the prompt's ids, and the bytes that they came as, if they did.

        Text is tokenized in a thread: a long one would stop everybody else.
        """
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            packed_ids = request.tokens.packed_ids
            return read_packed_ids(packed_ids), packed_ids
        if kind == "text":
            return await asyncio.to_thread(self._tokenizer.text, request.text, max_tokens=max_tokens), None
        if kind == "chat":
            # Gone through in the thread too: a million short messages take a second.
            messages = ((message.role, message.content) for message in request.chat.messages)
            return await asyncio.to_thread(self._tokenizer.chat, messages, max_tokens=max_tokens), None
        raise InvalidRequestError("the prompt is empty: set one of text, chat and tokens")
