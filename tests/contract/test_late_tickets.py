"""A prefill node that gets a prompt before its ticket: the ticket may come at any time, or never."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from contract.prefill_process import Client, DecodePeer, NodeProcess, prefill_node
from contract.prefill_requests import (
    CHUNK,
    MODEL,
    NEEDS_RECORDING,
    a_ref,
    events_of,
    kinds,
    latents_of,
    recorded,
    request_of,
    some_prompt,
    status_of,
)
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto.v1 import common_pb2, handoff_pb2, prefill_pb2
from oracle_data import FOLDER

pytestmark = NEEDS_RECORDING
SAMPLING = common_pb2.Sampling(max_tokens=8)
TOKENS = 1500  # twelve chunks


@pytest.fixture(scope="module")
def node(index: EmbeddedServer) -> Iterator[NodeProcess]:
    options = ("--chunk-tokens", str(CHUNK))
    with prefill_node(FOLDER / MODEL, *options, ring_size=1, index_url=index.url, name="prefill-late") as started:
        yield started


def begin(client: Client, ref: common_pb2.RequestRef, prompt: list[int], **changes: Any) -> Any:
    return client.prefill(ref, prompt, ticket_follows=True, sampling=SAMPLING, **changes)


async def give(client: Client, ticket: handoff_pb2.Ticket) -> None:
    await client.stub.GiveTicket(prefill_pb2.GiveTicketRequest(ticket=ticket))


async def code_of_giving(client: Client, ticket: handoff_pb2.Ticket) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await give(client, ticket)
    return caught.value.code()


@pytest.mark.parametrize("when", ["before the prompt", "while it is computed", "after the first token"])
async def test_everything_lands_whenever_the_ticket_comes(client: Client, peer: DecodePeer, when: str) -> None:
    ref = a_ref()
    # Another prefix each time: what is cached is not computed.
    prompt = [*some_prompt(64), *recorded()["prompt_1500"].tolist()[64:]]
    ticket, pages = peer.reserve(ref, client.node, TOKENS)
    if when == "before the prompt":
        await give(client, ticket)
    call, events = begin(client, ref, prompt), []
    async for event in call:
        events.append(event)
        progress = kinds(events).count("progress")
        if (when == "while it is computed" and kinds(events)[-1] == "progress" and progress == 3) or (
            when == "after the first token" and kinds(events)[-1] == "first_token"
        ):
            await give(client, ticket)

    assert kinds(events)[-2:] == ["first_token", "done"]
    admitted = await asyncio.wait_for(peer.admitted.get(), 20)
    assert admitted.first_token is not None
    assert admitted.first_token.token_id == events[-2].first_token.token.token_id
    rows = peer.rows(pages, TOKENS).numpy()
    assert np.abs(rows - latents_of(prompt)).max() < 1e-4
    assert events[-1].done.relayed_bytes == admitted.relayed_bytes == rows.nbytes
    peer.hub.released(admitted.epoch)
    await client.settled()
    await peer.all_pages_free()


async def test_cached_tokens_leave_too_when_the_ticket_comes_late(client: Client, peer: DecodePeer) -> None:
    prompt, ref = some_prompt(400), a_ref()
    await events_of(client.prefill(a_ref(), prompt[:330]))
    ticket, pages = peer.reserve(ref, client.node, len(prompt), resident_tokens=64)

    events = []
    async for event in begin(client, ref, prompt):
        events.append(event)
        if kinds(events)[-1] == "first_token":
            await give(client, ticket)

    assert events[0].started.cached_tokens == 320
    assert (await asyncio.wait_for(peer.admitted.get(), 20)).cached_tokens == 320
    landed = peer.rows(pages, len(prompt)).numpy()[:, 64:]
    assert np.abs(landed - latents_of(prompt)[:, 64:]).max() < 1e-4
    await client.settled()


async def test_a_request_whose_ticket_never_comes_ends_when_it_is_cancelled_and_takes_none_afterwards(
    client: Client, peer: DecodePeer
) -> None:
    ref = a_ref()
    ticket, _ = peer.reserve(ref, client.node, 200)
    call = begin(client, ref, some_prompt(200))
    async for event in call:
        if event.WhichOneof("event") == "first_token":
            break
    await client.stub.Abort(common_pb2.AbortRequest(request=ref, reason="decode has no room"))

    assert await status_of(call) == (grpc.StatusCode.CANCELLED, "decode has no room")
    assert await code_of_giving(client, ticket) is grpc.StatusCode.FAILED_PRECONDITION
    await client.settled()
    peer.hub.abort(request_of(ref), "no room")
    await peer.all_pages_free()


async def test_a_ticket_that_comes_while_its_request_is_aborted_leaves_nothing_behind(
    client: Client, peer: DecodePeer
) -> None:
    for _ in range(8):
        ref = a_ref()
        ticket, _ = peer.reserve(ref, client.node, TOKENS)
        call = begin(client, ref, some_prompt(TOKENS))
        async for _ in call:
            break
        abort = client.stub.Abort(common_pb2.AbortRequest(request=ref, reason="over"))
        await asyncio.gather(give(client, ticket), abort, return_exceptions=True)

        assert (await status_of(call))[0] is grpc.StatusCode.CANCELLED
        peer.hub.abort(request_of(ref), "over")
    await client.settled()
    await peer.all_pages_free()


async def test_a_first_token_that_ends_the_request_needs_no_ticket(client: Client, peer: DecodePeer) -> None:
    prompt, ref = recorded()["prompt_333"].tolist(), a_ref()
    ticket, _ = peer.reserve(ref, client.node, len(prompt))
    stop = int(recorded()["greedy_333"][0])
    sampling = common_pb2.Sampling(max_tokens=8, stop_token_ids=[stop])

    events = await events_of(client.prefill(ref, prompt, ticket_follows=True, sampling=sampling))

    assert kinds(events)[-2:] == ["first_token", "done"]
    assert events[-2].first_token.finish_reason == common_pb2.FINISH_REASON_STOP
    assert await code_of_giving(client, ticket) is grpc.StatusCode.FAILED_PRECONDITION
    await client.settled()
    peer.hub.abort(request_of(ref), "over")
    await peer.all_pages_free()


async def test_a_ticket_for_other_pages_fails_its_request(client: Client, peer: DecodePeer) -> None:
    ref = a_ref()
    ticket, _ = peer.reserve(ref, client.node, 200)
    garbled = type(ticket).FromString(ticket.SerializeToString())
    garbled.layout_fingerprint = b"x" * 16
    call = begin(client, ref, some_prompt(200))
    async for _ in call:
        break

    assert await code_of_giving(client, garbled) is grpc.StatusCode.FAILED_PRECONDITION
    code, text = await status_of(call)
    assert (code, "layout" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True), text
    await client.settled()
    peer.hub.abort(request_of(ref), "over")
    await peer.all_pages_free()


async def test_a_request_has_its_ticket_or_says_that_it_follows(client: Client, peer: DecodePeer) -> None:
    ref = a_ref()
    ticket, _ = peer.reserve(ref, client.node, 70)

    code, text = await status_of(begin(client, ref, some_prompt(70), ticket=ticket))

    assert (code, "ticket" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    peer.hub.abort(request_of(ref), "over")


def test_a_node_of_one_rank_says_that_it_takes_late_tickets(node: NodeProcess) -> None:
    assert node.record.takes_late_tickets


async def test_a_ring_wants_its_ticket_with_the_request(index: EmbeddedServer) -> None:
    options = ("--chunk-tokens", str(CHUNK))
    with prefill_node(FOLDER / MODEL, *options, ring_size=2, index_url=index.url, name="prefill-ring") as ring:
        client = Client(ring)
        code, text = await status_of(begin(client, a_ref(), some_prompt(70)))
        await client.close()

    assert not ring.record.takes_late_tickets
    assert (code, "ticket" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
