"""A ticket, checked: it comes through two other processes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.errors import InvalidRequestError, LayoutMismatchError, StaleMessageError
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Epoch, Incarnation
from kvrelay.kv_transfer.transport import Address
from kvrelay.kv_transfer.values import MAX_RING_SIZE, ChecksumKind, Request
from kvrelay.kv_transfer.wire import address_from_pb, checksum_kind_from_pb, request_from_pb
from kvrelay.kvcache.allocator import pages_of
from kvrelay.proto.convert import epoch_from_pb, incarnation_from_pb, runs_from_pb
from kvrelay.proto.v1 import handoff_pb2


@dataclass(frozen=True, slots=True)
class OpenedTicket:
    epoch: Epoch
    request: Request
    pages: tuple[int, ...]  # of decode's pool, in token order
    address: Address  # of decode's agent
    destination_digest: bytes
    checksum_kind: ChecksumKind


def open_ticket(ticket: handoff_pb2.Ticket, *, writer: Incarnation, rank: int, layout: PageLayout) -> OpenedTicket:
    """Return what a rank needs to write under a ticket.

    Raises:
        StaleMessageError: it names another writer.
        LayoutMismatchError: its pages mean something else than ours.
        InvalidRequestError: it contradicts itself.
    """
    named = incarnation_from_pb(ticket.writer)
    if named != writer:
        raise StaleMessageError(f"the ticket is for {named}, not {writer}")
    check_layout(ticket, layout)
    if not 0 <= rank < ticket.ring_size <= MAX_RING_SIZE:
        raise InvalidRequestError(f"rank {rank} of a ring of {ticket.ring_size}, which has at most {MAX_RING_SIZE}")
    if ticket.resident_tokens > ticket.prompt_tokens:
        raise InvalidRequestError(f"{ticket.resident_tokens} resident of {ticket.prompt_tokens} tokens")
    address = address_from_pb(ticket.address)
    if address.pool.num_bytes < address.pool_pages * layout.page_bytes_all_layers:  # there may be staging behind
        raise InvalidRequestError(f"a pool of {address.pool.num_bytes} bytes for {address.pool_pages} pages")
    runs = runs_from_pb(ticket.pages)
    # Not all runs in a message: a long prompt may have thousands, more than an error can carry.
    num_pages = sum(run.num_pages for run in runs)
    if num_pages != layout.pages_for(ticket.prompt_tokens):
        raise InvalidRequestError(f"{num_pages} pages for a prompt of {ticket.prompt_tokens} tokens")
    end = max((run.first_page + run.num_pages for run in runs), default=0)
    if end > address.pool_pages:
        raise InvalidRequestError(f"page {end - 1} of a pool of {address.pool_pages} pages")
    pages = tuple(pages_of(runs))
    digest = destination_digest(
        ring_size=ticket.ring_size,
        prompt_tokens=ticket.prompt_tokens,
        resident_tokens=ticket.resident_tokens,
        fence_slot=ticket.fence_slot,
        pages=pages,
    )
    kind = checksum_kind_from_pb(ticket.checksum_kind)
    return OpenedTicket(epoch_from_pb(ticket.epoch), request_from_pb(ticket.request), pages, address, digest, kind)


def check_layout(ticket: handoff_pb2.Ticket, layout: PageLayout) -> None:
    """Raise LayoutMismatchError when the pages of a ticket mean something else than ours."""
    if ticket.layout_fingerprint != layout.fingerprint:
        raise LayoutMismatchError(
            f"layout {ticket.layout_fingerprint.hex()} of the ticket, {layout.fingerprint.hex()} here"
        )


def destination_digest(
    *, ring_size: int, prompt_tokens: int, resident_tokens: int, fence_slot: int, pages: Sequence[int]
) -> bytes:
    """Return 16 bytes that stand for everything of a ticket that says where its ranks write.

    Decode compares them with its reservation before it lets a rank in, so a ticket that was changed on its way, or made
    up around a true epoch, never reaches pages that were not reserved for it.
    """
    numbers = array("q", (ring_size, prompt_tokens, resident_tokens, fence_slot, *pages))
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()
