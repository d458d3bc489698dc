"""What speaks against a request before it is queued, whatever else is here."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core import hash_on_loop
from kvrelay.core.errors import InvalidRequestError, LayoutMismatchError, StaleMessageError, UnavailableError
from kvrelay.core.layout import PageLayout
from kvrelay.core.sampling_limits import check_sampling
from kvrelay.core.types import Incarnation
from kvrelay.prefill_node.jobs import Job
from kvrelay.proto.convert import check_request_id, incarnation_from_pb, sampling_from_pb, view_ids
from kvrelay.proto.v1 import common_pb2, handoff_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What this node is; requests are checked against it."""

    incarnation: Incarnation
    layout: PageLayout
    ring_size: int
    vocab_size: int
    max_model_len: int
    cache_window_tokens: int | None  # longer requests neither publish nor use cached blocks; None = no limit
    max_request_s: float

    @property
    def takes_late_tickets(self) -> bool:
        """Only between steps could the other ranks of a ring be told of one."""
        return self.ring_size == 1


async def job_of(request: prefill_pb2.PrefillRequest, facts: NodeFacts) -> Job:
    """Return a request as a job; its prompt is hashed beside the event loop.

    Raises:
        UnavailableError: meant for another incarnation.
        StaleMessageError: the ticket is for another attempt.
        InvalidRequestError: the request is wrong in itself.
        LayoutMismatchError: the ticket's pages are not like ours.
    """
    if incarnation_from_pb(request.node) != facts.incarnation:
        raise UnavailableError(f"this is {facts.incarnation}, not {incarnation_from_pb(request.node)}")
    check_request_id(request.request.request_id)
    sampling = sampling_from_pb(request.sampling)
    check_sampling(sampling)
    prompt_T = view_ids(request.packed_ids)  # bytes of our own: the message makes them when it is asked
    if not 0 < len(prompt_T) <= facts.max_model_len:
        raise InvalidRequestError(f"a prompt of {len(prompt_T)} tokens; 1 to {facts.max_model_len} are possible")
    if (largest := int(prompt_T.max())) >= facts.vocab_size:
        raise InvalidRequestError(f"token id {largest} is not below {facts.vocab_size}")
    if request.num_sent_tokens > len(prompt_T):
        raise InvalidRequestError(f"{request.num_sent_tokens} sent tokens in a prompt of {len(prompt_T)}")
    ticket = request.ticket if request.HasField("ticket") else None
    if ticket is not None:
        check_ticket(ticket, request.request, len(prompt_T), facts)
    if request.ticket_follows and (ticket is not None or not facts.takes_late_tickets):
        raise InvalidRequestError("a ticket that follows is one too many here")
    hashes: list[bytes] = []
    window, length = facts.cache_window_tokens, len(prompt_T) + request.sampling.max_tokens
    if request.prefix_seed and (window is None or length <= window):
        hashes = await hash_on_loop.chain(request.prefix_seed, prompt_T, block_tokens=facts.layout.block_tokens)
    return Job(
        request=request.request,
        prompt_T=prompt_T,
        sampling=sampling,
        num_sent_tokens=request.num_sent_tokens,
        block_hashes=tuple(hashes),
        ticket=ticket,
        ticket_follows=request.ticket_follows,
    )


def check_ticket(ticket: handoff_pb2.Ticket, ref: common_pb2.RequestRef, prompt_tokens: int, facts: NodeFacts) -> None:
    """
    Raises:
        StaleMessageError, InvalidRequestError, LayoutMismatchError: the ticket is not for this request and node.
    """
    if ticket.layout_fingerprint != facts.layout.fingerprint:
        theirs, ours = ticket.layout_fingerprint.hex(), facts.layout.fingerprint.hex()
        raise LayoutMismatchError(f"decode's page layout is {theirs}, this node's is {ours}")
    if incarnation_from_pb(ticket.writer) != facts.incarnation or ticket.ring_size != facts.ring_size:
        raise InvalidRequestError(
            f"the ticket is for {incarnation_from_pb(ticket.writer)} with {ticket.ring_size} ranks,"
            f" this is {facts.incarnation} with {facts.ring_size}"
        )
    if ticket.request != ref:
        raise StaleMessageError(f"the ticket is for {ticket.request}, the request is {ref}")
    pages = sum(run.num_pages for run in ticket.pages)
    if ticket.prompt_tokens != prompt_tokens or pages < facts.layout.pages_for(prompt_tokens):
        raise InvalidRequestError(
            f"the ticket covers {ticket.prompt_tokens} tokens with {pages} pages, the prompt has {prompt_tokens}"
        )
    if ticket.resident_tokens > prompt_tokens:
        raise InvalidRequestError(f"{ticket.resident_tokens} resident tokens of {prompt_tokens}")
