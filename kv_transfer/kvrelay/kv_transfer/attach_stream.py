"""One rank's Attach stream, seen from decode."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from kvrelay.core.errors import InvalidRequestError, ServeError, StaleMessageError
from kvrelay.core.grpc_status import grpc_status
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.hub_sessions import Entry, HubSessions, Outbox
from kvrelay.kv_transfer.session_table import State
from kvrelay.kv_transfer.ticket import destination_digest
from kvrelay.kv_transfer.transport import agent_name
from kvrelay.kv_transfer.values import FenceProof
from kvrelay.kv_transfer.wire import manifest_from_pb_on_loop, proof_from_pb, request_from_pb
from kvrelay.proto.convert import epoch_from_pb, incarnation_from_pb
from kvrelay.proto.v1 import decode_pb2, handoff_pb2

_HELLO_TIMEOUT_S = 10.0

Incoming = AsyncIterator[handoff_pb2.WriterEvent]


async def serve_stream(
    sessions: HubSessions, incoming: Incoming, context: aio.ServicerContext[Any, Any]
) -> AsyncIterator[handoff_pb2.ReaderEvent]:
    """Yield what a rank must hear, from its yes to its end; a refusal ends the call with its status."""
    async with grpc_status(context):
        entry, rank = await _greet(sessions, incoming)
    outbox = entry.outboxes[rank]
    listener = asyncio.create_task(_listen(sessions, entry, rank, incoming))
    try:
        while (event := await outbox.get()) is not None:
            yield event
    finally:
        listener.cancel()
        del entry.outboxes[rank]
        if entry.session.state not in (State.FENCED, State.FREE):
            sessions.feed(entry, ev.StreamLost(rank))


def take_late_fence(sessions: HubSessions, request: decode_pb2.FencedRequest) -> None:
    """Take a fence that was not heard on its stream; one that nobody waits for changes nothing.

    Raises:
        StaleMessageError: it is not by the writer that the epoch was opened for.
        InvalidRequestError: it is not proven.
    """
    hello, epoch = request.rank, epoch_from_pb(request.rank.epoch)
    try:
        entry = sessions.of_epoch(epoch)
    except StaleMessageError:
        return
    ours = entry.session.reservation
    named = incarnation_from_pb(hello.writer) == ours.writer and request_from_pb(hello.request) == ours.request
    if not (named and hmac.compare_digest(hello.one_time_token, ours.one_time_token)):
        raise StaleMessageError(f"epoch {epoch} is for {ours.request} written by {ours.writer}")
    let_in = entry.session.stream_of(hello.rank)
    if let_in is None:
        # Its hello was lost, or is still on its way: then it finds the epoch closed.
        sessions.feed(entry, ev.Abort(f"rank {hello.rank} gave up before it was let in"))
    elif let_in == hello.stream_id:
        _feed(sessions, entry, _fence_of(sessions, entry, hello.rank, request.fenced))
    else:
        raise StaleMessageError(f"epoch {epoch} has let in another stream of rank {hello.rank}")


async def _greet(sessions: HubSessions, incoming: Incoming) -> tuple[Entry, int]:
    """Return the session and rank that the first message names, attached."""
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(incoming, None)
    except TimeoutError:
        first = None
    if first is None or not first.HasField("hello"):
        raise InvalidRequestError("an Attach stream begins with a hello")
    hello = first.hello
    try:
        return _attach(sessions, hello)
    except ServeError:
        sessions.counters.add("attaches_refused_total")
        raise


def _attach(sessions: HubSessions, hello: handoff_pb2.AttachHello) -> tuple[Entry, int]:
    entry, rank = sessions.of_epoch(epoch_from_pb(hello.epoch)), hello.rank
    writer = incarnation_from_pb(hello.writer)
    if hello.address.agent_name != agent_name(writer, rank):
        raise InvalidRequestError(f"rank {rank} of {writer} comes with the agent {hello.address.agent_name!r}")
    if not hmac.compare_digest(hello.destination_digest, _destination_of(entry)):
        raise StaleMessageError(
            f"the ticket of rank {rank} of {writer} does not name what epoch {entry.epoch} reserved"
        )
    event = ev.Attach(
        rank, writer, request_from_pb(hello.request), hello.one_time_token, hello.layout_fingerprint, hello.stream_id
    )
    outbox: Outbox = asyncio.Queue()
    known = entry.outboxes.get(rank)
    entry.outboxes[rank] = outbox
    try:
        sessions.feed(entry, event)
    except ServeError:
        if known is None:
            del entry.outboxes[rank]
        else:
            entry.outboxes[rank] = known
        raise
    entry.shares_device |= bool(hello.device) and hello.device == sessions.device
    return entry, rank


def _destination_of(entry: Entry) -> bytes:
    ours = entry.session.reservation
    return destination_digest(
        ring_size=ours.ring_size,
        prompt_tokens=ours.prompt_tokens,
        resident_tokens=ours.resident_tokens,
        fence_slot=entry.fence_slot,
        pages=ours.pages,
    )


async def _listen(sessions: HubSessions, entry: Entry, rank: int, incoming: Incoming) -> None:
    """Feed the session what a rank says, until it stops talking."""
    outbox = entry.outboxes[rank]
    try:
        async for message in incoming:
            try:
                event = await _event_of(sessions, entry, rank, message)
            except InvalidRequestError as err:
                event = ev.Abort(f"rank {rank}: {err}")
            _feed(sessions, entry, event)
    finally:
        outbox.put_nowait(None)


def _feed(sessions: HubSessions, entry: Entry, event: ev.Event) -> None:
    if isinstance(event, ev.Fenced) and event.proof is FenceProof.LINK_CLOSED:
        sessions.after_drain(lambda: sessions.feed_from_peer(entry, event))
    else:
        sessions.feed_from_peer(entry, event)


async def _event_of(sessions: HubSessions, entry: Entry, rank: int, message: handoff_pb2.WriterEvent) -> ev.Event:
    match message.WhichOneof("event"):
        case "manifest":
            manifest = await manifest_from_pb_on_loop(message.manifest, row_bytes=entry.session.reservation.row_bytes)
            if manifest.rank != rank:
                raise InvalidRequestError(f"the manifest of rank {manifest.rank}")
            return ev.ManifestIn(manifest)
        case "abort":
            return ev.Abort(f"rank {rank} gave up: {message.abort.reason}")
        case "fenced":
            return _fence_of(sessions, entry, rank, message.fenced)
        case other:
            raise InvalidRequestError(f"{other} is not expected after the hello")


def _fence_of(sessions: HubSessions, entry: Entry, rank: int, fenced: handoff_pb2.WriterFenced) -> ev.Fenced:
    proof = proof_from_pb(fenced)
    if proof is FenceProof.CELL_WRITTEN:
        written = sessions.slots.written(entry.fence_slot, rank)
        if written != entry.epoch.counter:
            raise InvalidRequestError(f"its fence cell holds {written}, not {entry.epoch.counter}")
    return ev.Fenced(rank, proof)
