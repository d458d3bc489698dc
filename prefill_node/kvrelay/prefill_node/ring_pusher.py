"""Writes cached blocks into the pages of a prefill node that asks for them: every rank writes what it holds."""

from __future__ import annotations

import asyncio
import secrets

from kvrelay.core.types import Counters
from kvrelay.kv_transfer.push_servicer import picked_pages
from kvrelay.kv_transfer.wire import request_from_pb
from kvrelay.prefill_node.job_events import Failed, JobEvent
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.pushes import Push
from kvrelay.prefill_node.step_answer import Reply
from kvrelay.proto.convert import epoch_from_pb
from kvrelay.proto.v1 import blocks_pb2


class RingPusher:
    """All pushes of a prefill node. Owned by the event loop."""

    def __init__(self, leader: Leader) -> None:
        self.counters = Counters()
        self._leader = leader

    async def push(self, request: blocks_pb2.PushRequest) -> int:
        """Write blocks under a ticket and see it through; return the tokens that were written.

        The pages stay held until no write can read them any more, which may be later.

        Raises:
            CapacityError: too many are on their way.
            StaleMessageError: some block is not here any more.
            TransferError: it failed; the asker has been told by the session.
        """
        ticket = request.ticket
        # Requests have names of their own inside the ring, and a ticket may come twice.
        key = f"push {request_from_pb(ticket.request)} {epoch_from_pb(ticket.epoch)} {secrets.token_hex(4)}"
        self.counters.add("pushes_total")
        reply = Reply[JobEvent]()
        self._leader.push(Push(key, ticket, tuple(request.block_hashes), picked_pages(request)), reply.give)
        try:
            event = await reply.future
        except asyncio.CancelledError:
            self._leader.cancel(key, "the node that asked for it went away")
            raise
        if isinstance(event, Failed):
            self.counters.add("pushes_failed_total")
            raise event.error
        num_tokens = ticket.prompt_tokens - ticket.resident_tokens
        self.counters.add("pushed_tokens_total", num_tokens)
        return num_tokens
