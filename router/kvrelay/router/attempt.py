"""One try of a request on one pair of nodes: the reservation, the two streams, the leases, and their clean-up.

A prefill node that can gets the prompt before decode has made room, and the ticket as soon as there is one: then no
request waits for its reservation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field

from grpc import aio

from kvrelay.core import tracing
from kvrelay.core.clock import Deadline, monotonic
from kvrelay.core.errors import DeadlineError, Status, UnavailableError
from kvrelay.core.types import Incarnation, Role, Sampling
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2, decode_pb2, handoff_pb2, prefill_pb2
from kvrelay.router.leases import LeaseKeeper, Peer
from kvrelay.router.legs import LegFailedError, LegMessage, Legs, why_failed
from kvrelay.router.peers import Node, Peers, Placed, PullFrom
from kvrelay.router.prepared import PrefillCall, PromptCall

ABORT_TIMEOUT_S = 1.0
SETTLE_TIMEOUT_S = 5.0  # for prefill to say its last word after decode has finished
FULL_S = 1.0  # for so long a decode node that had no room is asked for some before a prompt is begun


class Background:
    """Tasks that outlive a request by a bounded time: aborts and last words."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Shared:
    """What every attempt of every request shares."""

    me: Incarnation
    peers: Peers
    leases: LeaseKeeper
    background: Background
    full_until_s: dict[Incarnation, float] = field(default_factory=dict)  # decode nodes that had no room just now

    def is_full(self, node: Incarnation) -> bool:
        return self.full_until_s.get(node, 0.0) > monotonic()

    def note_full(self, node: Incarnation) -> None:
        now_s = monotonic()
        for other in [other for other, until_s in self.full_until_s.items() if until_s <= now_s]:
            del self.full_until_s[other]
        self.full_until_s[node] = now_s + FULL_S


@dataclass(frozen=True, slots=True)
class Work:
    """What one attempt has to do: the prompt ends with `num_sent` tokens that the client has already."""

    ref: common_pb2.RequestRef
    packed_ids: bytes  # of the prompt
    sampling: Sampling  # max_tokens counts from here
    num_sent: int


class Attempt:
    """Call begin, reserve, start, then next until the request has ended; always close."""

    def __init__(
        self,
        shared: Shared,
        placed: Placed,
        work: Work,
        deadline: Deadline,
    ) -> None:
        self._shared = shared
        self._placed = placed
        self._deadline = deadline
        self._ref = work.ref
        self._packed = work.packed_ids
        self._sampling = convert.sampling_to_pb(work.sampling)
        self.num_sent = work.num_sent  # tokens that the client had before
        self._ticket: handoff_pb2.Ticket | None = None
        self._held: dict[Role, Peer] = {}
        nodes = {Role.PREFILL: placed.prefill.incarnation}
        if placed.decode is not None:
            nodes[Role.DECODE] = placed.decode.incarnation
        self._legs = Legs(nodes)
        self._begun: set[Role] = set()  # nodes that may know of this attempt
        self._giving: asyncio.Task[None] | None = None  # the ticket to prefill
        self.finished = False  # the request's last token has come
        self.decode_finished = False
        self.is_local = False  # decode completes the prompt itself: prefill has no part in it

    def begin(self) -> bool:
        """Give the prompt to prefill already, if it can do without the ticket for now; return whether.

        Not where decode had no room just now: what a prompt takes at prefill, others would lose for nothing.
        """
        decode, prefill = self._placed.decode, self._placed.prefill
        if decode is None or self._placed.is_local or not prefill.takes_late_tickets:
            return False
        if self._shared.is_full(decode.incarnation):
            return False
        self._start_prefill(ticket_follows=True)
        return True

    async def reserve(self) -> None:
        """Reserve decode's pages; nothing to do for a request that ends at prefill.

        Raises:
            LegFailedError: decode refused or could not be reached.
        """
        node = self._placed.decode
        if node is None:
            return
        request = decode_pb2.ReserveRequest(
            request=self._ref,
            holder=convert.incarnation_to_pb(self._shared.me),
            node=convert.incarnation_to_pb(node.incarnation),
            writer=convert.incarnation_to_pb(self._placed.prefill.incarnation),
            ring_size=self._placed.prefill.ring_size,
            packed_ids=self._packed,
            sampling=self._sampling,
            layout_fingerprint=node.layout_fingerprint,
            num_sent_tokens=self.num_sent,
            prefix_seed=self._placed.prefix_seed,
            timeout_ms=convert.ms_to_pb(self._deadline.remaining_s()),
            may_compute=self._placed.is_local,
        )
        self._begun.add(Role.DECODE)
        try:
            reply = await self._shared.peers.decode(node).Reserve(
                request, timeout=self._deadline.remaining_s(), metadata=tracing.outgoing()
            )
        except aio.AioRpcError as err:
            cause = why_failed(err, node.incarnation)
            if isinstance(cause, UnavailableError):
                self._shared.peers.put_aside(node.incarnation, str(cause))
            elif cause.status is Status.RESOURCE_EXHAUSTED:
                self._shared.note_full(node.incarnation)
            raise LegFailedError(cause, frozenset({node.incarnation})) from err
        self._ticket, self.is_local = reply.ticket, reply.computes
        self._hold(Role.DECODE, node)

    def start(self) -> None:
        """Open both streams, or what is left of that: decode's alone when it computes the prompt itself."""
        if Role.PREFILL in self._begun:
            self._giving = asyncio.create_task(self._give_ticket())
        elif not self.is_local:
            self._start_prefill()  # the first token waits for it; decode has nothing to say before
        if self._placed.prefill.takes_prepared_calls and Role.PREFILL in self._begun:
            self._shared.peers.prepared(self._placed.prefill).prepare()  # for the next request
        if self._placed.decode is not None and self._ticket is not None:
            decode = self._shared.peers.decode(self._placed.decode)
            request = decode_pb2.DecodeRequest(request=self._ref, epoch=self._ticket.epoch)
            timeout_s = self._deadline.remaining_s()
            self._legs.start(Role.DECODE, decode.Decode(request, timeout=timeout_s, metadata=tracing.outgoing()))

    def _start_prefill(self, *, ticket_follows: bool = False) -> None:
        node = self._placed.prefill
        self._begun.add(Role.PREFILL)
        request = prefill_pb2.PrefillRequest(
            request=self._ref,
            holder=convert.incarnation_to_pb(self._shared.me),
            node=convert.incarnation_to_pb(node.incarnation),
            packed_ids=self._packed,
            sampling=self._sampling,
            ticket=self._ticket,
            num_sent_tokens=self.num_sent,
            prefix_seed=self._placed.prefix_seed,
            pull_from=_pull_to_pb(self._placed.pull_from),
            ticket_follows=ticket_follows,
        )

        def call() -> PrefillCall:
            prefill = self._shared.peers.prefill(node)
            return prefill.Prefill(request, timeout=self._deadline.remaining_s(), metadata=tracing.outgoing())

        open_call = self._shared.peers.prepared(node).take() if node.takes_prepared_calls else None
        leg = call() if open_call is None else PromptCall(open_call, request, deadline=self._deadline, anew=call)
        self._hold(Role.PREFILL, node)
        self._legs.start(Role.PREFILL, leg)

    async def _give_ticket(self) -> None:
        node = self._placed.prefill
        try:
            await self._shared.peers.prefill(node).GiveTicket(
                prefill_pb2.GiveTicketRequest(ticket=self._ticket),
                timeout=self._deadline.remaining_s(),
                metadata=tracing.outgoing(),
            )
        except aio.AioRpcError as err:
            error = why_failed(err, node.incarnation)
            # A request that ended at prefill meanwhile needs none; its stream says how it ended.
            if error.status is not Status.FAILED_PRECONDITION:
                self._legs.failed(Role.PREFILL, error)

    async def next(self, timeout_s: float) -> LegMessage | None:
        """Return the next message of either leg, or None.

        Raises:
            LegFailedError: a leg failed.
            DeadlineError: the request's time is over.
        """
        remaining_s = self._deadline.remaining_s()
        if remaining_s <= 0:
            raise DeadlineError(f"request {self._ref.request_id} ran out of time")
        try:
            message = await self._legs.next(min(timeout_s, remaining_s))
        except LegFailedError as err:
            for culprit in err.culprits:
                if isinstance(err.cause, UnavailableError):
                    self._shared.peers.put_aside(culprit, str(err.cause))
            raise
        if self._legs.ended(Role.PREFILL):
            self._drop(Role.PREFILL)
        return message

    def check_not_ended(self, *, first_token_came: bool) -> None:
        """Raise LegFailedError when a stream that still had something to say has ended."""
        if self._legs.ended(Role.PREFILL) and not first_token_came:
            raise self._ended_early(self._placed.prefill)
        if self._placed.decode is not None and self._legs.ended(Role.DECODE) and not self.decode_finished:
            raise self._ended_early(self._placed.decode)

    def decode_admitted(self) -> None:
        """From here on decode holds the request itself."""
        self._drop(Role.DECODE)

    async def close(self) -> None:
        """End both legs and drop the leases; after a failure tell both nodes, in the background."""
        for role in tuple(self._held):
            self._drop(role)
        if self._giving is not None:
            self._giving.cancel()
        if self.finished and self.decode_finished:
            await self._legs.stop(Role.DECODE)
            self._shared.background.run(self._legs.finish(Role.PREFILL, SETTLE_TIMEOUT_S))
            return
        try:
            await self._legs.stop_all()
        finally:  # also when the call is cancelled just now, as at its deadline: nobody else tells the nodes
            for role in self._begun:
                # A request that ended with its first token leaves decode's reservation; prefill ends by itself.
                if role is Role.DECODE or not self.finished:
                    self._shared.background.run(self._abort(role))

    async def _abort(self, role: Role) -> None:
        reason = "ended with the first token" if self.finished else "the other leg or the client is gone"
        request = common_pb2.AbortRequest(request=self._ref, reason=reason)
        with suppress(aio.AioRpcError):  # streams and leases end it as well
            if role is Role.PREFILL:
                await self._shared.peers.prefill(self._placed.prefill).Abort(request, timeout=ABORT_TIMEOUT_S)
            elif self._placed.decode is not None:
                await self._shared.peers.decode(self._placed.decode).Abort(request, timeout=ABORT_TIMEOUT_S)

    def _ended_early(self, node: Node) -> LegFailedError:
        cause = UnavailableError(f"{node.incarnation} ended its stream before its last message")
        return LegFailedError(cause, frozenset({node.incarnation}))

    def _hold(self, role: Role, node: Node) -> None:
        loop = asyncio.get_running_loop()
        peer = Peer(role, node.endpoint)
        self._held[role] = peer

        def on_lost() -> None:
            loop.call_soon_threadsafe(self._legs.lost, role)

        self._shared.leases.hold(peer, self._ref.request_id, on_lost)

    def _drop(self, role: Role) -> None:
        peer = self._held.pop(role, None)
        if peer is not None:
            self._shared.leases.drop(peer, self._ref.request_id)


def _pull_to_pb(source: PullFrom | None) -> prefill_pb2.PullFrom | None:
    if source is None:
        return None
    node = convert.incarnation_to_pb(source.node.incarnation)
    return prefill_pb2.PullFrom(
        node=node, endpoint=source.node.endpoint, tokens=source.tokens, ring_size=source.node.ring_size
    )
