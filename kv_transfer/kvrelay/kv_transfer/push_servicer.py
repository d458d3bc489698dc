"""The BlockSource service of either kind of node: what asks for cached blocks is checked here, and handed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from grpc import aio

from kvrelay.core import tracing
from kvrelay.core.errors import InvalidRequestError, StaleMessageError, UnavailableError
from kvrelay.core.grpc_status import grpc_status
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.ticket import check_layout
from kvrelay.kvcache.allocator import pages_of
from kvrelay.proto.convert import check_request_id, incarnation_from_pb, runs_from_pb
from kvrelay.proto.v1 import blocks_pb2, blocks_pb2_grpc


class PushServicer(blocks_pb2_grpc.BlockSourceServicer):
    def __init__(
        self,
        push: Callable[[blocks_pb2.PushRequest], Awaitable[int]],
        *,
        node: Incarnation,
        ring_size: int,
        layout: PageLayout,
        max_push_s: float,
        is_draining: Callable[[], bool],
    ) -> None:
        """
        Args:
            push: writes the blocks and sees it through; returns the tokens that were written.
            node, ring_size, layout: of this node.
            max_push_s: longest time that a ticket may give a push, which holds blocks and delays a drain so long.
            is_draining: refuse everything. A drain would have no end where others go on asking, and who reads blocks
                must have gone before the pool is another role's.
        """
        self._push = push
        self._node, self._ring_size, self._layout = node, ring_size, layout
        self._max_push_s, self._is_draining = max_push_s, is_draining

    async def Push(
        self, request: blocks_pb2.PushRequest, context: aio.ServicerContext[Any, Any]
    ) -> blocks_pb2.PushReply:
        async with grpc_status(context):
            self._check(request)
            parent = tracing.incoming(context.invocation_metadata())
            with tracing.span("push", of=request.ticket.request.request_id, parent=parent):
                return blocks_pb2.PushReply(pushed_tokens=await self._push(request))

    def _check(self, request: blocks_pb2.PushRequest) -> None:
        """Raise when a request is not for this node, or contradicts itself.

        Raises:
            UnavailableError: this node is draining.
            StaleMessageError: the ticket names another writer.
            LayoutMismatchError: its pages mean something else than ours.
            InvalidRequestError: it is not for these blocks, or lasts too long.
        """
        if self._is_draining():
            raise UnavailableError(f"{self._node.name} is draining")
        ticket, layout = request.ticket, self._layout
        check_request_id(ticket.request.request_id)
        if ticket.timeout_ms > self._max_push_s * 1000:
            raise InvalidRequestError(f"a ticket for {ticket.timeout_ms / 1000:g} s; at most {self._max_push_s:g}")
        writer = incarnation_from_pb(ticket.writer)
        if writer != self._node or ticket.ring_size != self._ring_size:
            raise StaleMessageError(
                f"the ticket is for {writer} with {ticket.ring_size} ranks, this is {self._node} with {self._ring_size}"
            )
        check_layout(ticket, layout)
        num_blocks = len(request.block_hashes)
        num_tokens = num_blocks * layout.block_tokens
        if request.pages:
            last = max(run.first_page + run.num_pages for run in request.pages)
            if last * layout.page_tokens > num_tokens:
                raise InvalidRequestError(f"page {last - 1} of {num_blocks} blocks is asked for")
            num_tokens = sum(run.num_pages for run in request.pages) * layout.page_tokens
        if not num_blocks or ticket.prompt_tokens != num_tokens:
            raise InvalidRequestError(
                f"a ticket for {ticket.prompt_tokens} tokens, {num_blocks} blocks, {num_tokens} tokens asked for"
            )
        if ticket.resident_tokens > ticket.prompt_tokens:
            raise InvalidRequestError(f"{ticket.resident_tokens} resident of {ticket.prompt_tokens} tokens")


def picked_pages(request: blocks_pb2.PushRequest) -> tuple[int, ...] | None:
    """Return which pages of the blocks are asked for, in order; None when all are."""
    if not request.pages:
        return None
    return tuple(pages_of(runs_from_pb(request.pages)))
