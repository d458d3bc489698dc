"""The PrefillNode service: translate, check, hand to the step thread, translate back."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from grpc import aio

from kvrelay.core import tracing
from kvrelay.core.clock import Deadline, monotonic
from kvrelay.core.drain import OnDrain
from kvrelay.core.errors import (
    DeadlineError,
    RequestCancelledError,
    StaleMessageError,
    UnavailableError,
)
from kvrelay.core.grpc_status import grpc_status
from kvrelay.core.types import Counters, Incarnation
from kvrelay.prefill_node.fills import PullFrom
from kvrelay.prefill_node.intake import NodeFacts, check_ticket, job_of
from kvrelay.prefill_node.job_events import Done, Failed, FirstToken, JobEvent, Progress
from kvrelay.prefill_node.jobs import Job, job_key
from kvrelay.prefill_node.late_tickets import LateTickets
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.leases import Leases
from kvrelay.prefill_node.messages import event_to_pb, limit_of, source_of, trace_of
from kvrelay.prefill_node.prepared_calls import PreparedCalls
from kvrelay.prefill_node.puller import Puller
from kvrelay.prefill_node.stats import node_stats
from kvrelay.prefill_node.step_answer import answer_of
from kvrelay.proto.convert import (
    check_request_id,
    incarnation_from_pb,
    ms_to_pb,
)
from kvrelay.proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

PROGRESS_S = 2.0  # a client hears something at least this often
_MAX_REMEMBERED = 10_000  # requests whose latest attempt is known, so that older ones are refused


class PrefillServicer(prefill_pb2_grpc.PrefillNodeServicer):
    """Runs on the asyncio thread of rank 0."""

    def __init__(
        self,
        facts: NodeFacts,
        leader: Leader,
        leases: Leases,
        *,
        counters: Sequence[Counters],
        on_drain: OnDrain,
        puller: Puller | None = None,
    ) -> None:
        """
        Args:
            counters: of the node, besides those of its ranks; reported by Stats.
            puller: fetches what requests say that another node has; None: all of it is computed.
        """
        self._puller = puller
        self.leaving = False  # the others are told to send nothing more here
        self.draining = False  # what comes all the same is refused
        self._facts = facts
        self._leader = leader
        self._leases = leases
        self._counters = counters
        self._on_drain = on_drain
        self._prepared = PreparedCalls()
        self._latest_attempt: OrderedDict[str, int] = OrderedDict()
        self._active: set[str] = set()
        self._pulls: dict[str, asyncio.Task[int]] = {}
        self._late = LateTickets(
            check=lambda ticket, job: check_ticket(ticket, job.request, job.prompt_tokens, facts),
            give=leader.give_ticket,
            fail=leader.fail,
        )

    def refuse(self) -> None:
        """Take no request any more."""
        self.draining = True
        self._prepared.end()

    @property
    def active_requests(self) -> int:
        return len(self._active)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        async with grpc_status(context):
            source = source_of(request)
            job = await self._checked(request)
            limit_s, parent = limit_of(request, context, self._facts), trace_of(request, context)
            run = self._run(job, incarnation_from_pb(request.holder), Deadline.after(limit_s), source)
            with tracing.span("prefill", of=request.request.request_id, parent=parent):
                async with aclosing(run) as events:  # a caller that goes away ends the job at once
                    async for event in events:
                        yield event

    async def PreparedPrefill(
        self, requests: AsyncIterator[prefill_pb2.PrefillRequest], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        request = None if self.draining else await self._prepared.request(context)
        if request is None:
            return
        async with aclosing(self.Prefill(request, context)) as events:
            async for event in events:
                yield event

    async def GiveTicket(
        self, request: prefill_pb2.GiveTicketRequest, context: aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.GiveTicketReply:
        ref = request.ticket.request
        async with grpc_status(context):
            check_request_id(ref.request_id)
            key = job_key(ref)
            if key not in self._active and ref.attempt <= self._latest_attempt.get(ref.request_id, 0):
                raise StaleMessageError(f"request {ref.request_id}: attempt {ref.attempt} is over")
            self._late.bring(key, request.ticket)
        return prefill_pb2.GiveTicketReply()

    async def Abort(
        self, request: common_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.AbortReply:
        async with grpc_status(context):
            check_request_id(request.request.request_id)
        key = job_key(request.request)
        was_active = key in self._active
        if was_active:
            self._cancel(key, request.reason or "aborted")
        # An abort that overtakes its Prefill must win.
        self._remember(request.request)
        return common_pb2.AbortReply(was_active=was_active)

    async def Renew(
        self, request: common_pb2.RenewRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.RenewReply:
        unknown = self._leases.renew(incarnation_from_pb(request.holder), request.request_ids)
        return common_pb2.RenewReply(unknown_request_ids=unknown, lease_ms=ms_to_pb(self._leases.lease_s))

    async def Drain(
        self, request: common_pb2.DrainRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.DrainReply:
        active = self.active_requests
        async with grpc_status(context):
            self._on_drain(switch_role=request.switch_role)
        return common_pb2.DrainReply(active_requests=active)

    async def Stats(
        self, request: common_pb2.StatsRequest, context: aio.ServicerContext[Any, Any]
    ) -> common_pb2.NodeStats:
        return await self.stats()

    async def stats(self) -> common_pb2.NodeStats:
        """Return the account of all ranks, taken between two steps."""
        return await answer_of(
            self._leader.call,
            lambda control: node_stats(
                self._facts.incarnation,
                control,
                self._leader.rank_counters,
                [counters.values.copy() for counters in self._counters],
                draining=self.leaving,
            ),
        )

    async def _run(
        self, job: Job, holder: Incarnation, deadline: Deadline, source: PullFrom | None
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        received_s, loop = monotonic(), asyncio.get_running_loop()
        events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self._active.add(job.key)
        self._leases.open(job.key, request_id=job.request.request_id, holder=holder)
        over, has_token, prefilled_tokens = False, False, 0
        try:
            pulled_tokens = await self._pulled(job, source, deadline)
            self._leader.submit(
                self._late.ticketed(job), lambda event: loop.call_soon_threadsafe(events.put_nowait, event)
            )
            while not over:
                try:
                    async with asyncio.timeout(min(PROGRESS_S, deadline.remaining_s())):
                        event = await events.get()
                except TimeoutError:
                    if deadline.passed():
                        raise DeadlineError(f"request {job.request.request_id}: the time limit is over") from None
                    event = Progress(prefilled_tokens)
                if isinstance(event, Failed):
                    over = True
                    raise event.error
                if isinstance(event, Progress):
                    prefilled_tokens = event.prefilled_tokens
                    if has_token:  # nothing is left to progress
                        continue
                has_token, over = has_token or isinstance(event, FirstToken), isinstance(event, Done)
                yield event_to_pb(event, received_s, pulled_tokens)
        finally:
            self._active.discard(job.key)
            self._leases.close(job.key)
            self._late.forget(job.key)
            if not over:
                self._leader.cancel(job.key, "the caller went away or its time is over")

    async def _pulled(self, job: Job, source: PullFrom | None, deadline: Deadline) -> int:
        """Fetch what another node has of a job's prompt; return the tokens that came.

        Raises:
            RequestCancelledError: the job was given up meanwhile.
        """
        if self._puller is None or source is None:
            return 0
        pull = self._pulls[job.key] = asyncio.create_task(self._puller.pull(job, source, deadline))
        try:
            await asyncio.wait((pull,))
        finally:
            del self._pulls[job.key]
            pull.cancel()  # when this call was; it ends by itself, and its pages come back
        if pull.cancelled() or not self._leases.holds(job.key):
            raise RequestCancelledError(f"request {job.request.request_id} was given up")
        return pull.result()

    def _cancel(self, key: str, reason: str) -> None:
        if (pull := self._pulls.get(key)) is not None:
            self._leases.close(key)  # it may have ended just now: then nothing is left to cancel, but no job may follow
            pull.cancel()
        else:
            self._leader.cancel(key, reason)

    async def _checked(self, request: prefill_pb2.PrefillRequest) -> Job:
        """Return the request as a job.

        Raises:
            UnavailableError: meant for another incarnation, or this one is leaving.
            StaleMessageError: a newer attempt, or an abort of this one, was here before.
            InvalidRequestError: the request is wrong in itself.
            LayoutMismatchError: the ticket's pages are not like ours.
        """
        job = await job_of(request, self._facts)
        # Last, as other calls may have come meanwhile.
        if self.draining:
            raise UnavailableError(f"{self._facts.incarnation.name} is draining")
        self._check_attempt(request.request)
        return job

    def _check_attempt(self, ref: common_pb2.RequestRef) -> None:
        latest = self._latest_attempt.get(ref.request_id, 0)
        if ref.attempt <= latest:
            raise StaleMessageError(f"request {ref.request_id}: attempt {ref.attempt} is not newer than {latest}")
        older = job_key(common_pb2.RequestRef(request_id=ref.request_id, attempt=latest))
        if older in self._active:
            self._cancel(older, f"attempt {ref.attempt} takes over")
        self._remember(ref)

    def _remember(self, ref: common_pb2.RequestRef) -> None:
        latest = max(ref.attempt, self._latest_attempt.pop(ref.request_id, 0))
        self._latest_attempt[ref.request_id] = latest
        while len(self._latest_attempt) > _MAX_REMEMBERED:
            self._latest_attempt.popitem(last=False)
