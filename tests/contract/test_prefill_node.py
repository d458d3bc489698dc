"""A prefill node as routers and decode nodes see it: real processes, real NIXL."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from grpc import aio

from contract.prefill_process import (
    Client,
    DecodePeer,
    NodeProcess,
    prefill_node,
    silent_decode_node,
)
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
from kvrelay.core import prefix_hash
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.reader import Holding, PrefixReader
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto.v1 import common_pb2
from oracle_data import FOLDER

pytestmark = NEEDS_RECORDING


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "ring-of-2"])
def node(request: pytest.FixtureRequest, index: EmbeddedServer) -> Iterator[NodeProcess]:
    name = f"prefill-{request.param}"
    options = ("--chunk-tokens", str(CHUNK), "--lease-s", "3")
    with prefill_node(FOLDER / MODEL, *options, ring_size=request.param, index_url=index.url, name=name) as started:
        yield started


async def test_everything_lands_and_the_first_token_is_the_reference(client: Client, peer: DecodePeer) -> None:
    prompt = recorded()["prompt_1500"].tolist()
    ref = a_ref()
    ticket, pages = peer.reserve(ref, client.node, len(prompt))

    events = await events_of(client.prefill(ref, prompt, ticket=ticket))

    seen = kinds(events)
    assert (seen[0], seen[-2:], set(seen[1:-2])) == ("started", ["first_token", "done"], {"progress"})
    token = recorded()["greedy_1500"][0]
    assert events[-2].first_token.token.token_id == token
    admitted = await asyncio.wait_for(peer.admitted.get(), 20)
    assert admitted.first_token is not None
    assert admitted.first_token.token_id == token
    rows = peer.rows(pages, len(prompt)).numpy()
    assert np.abs(rows - latents_of(prompt)).max() < 1e-4
    assert events[-1].done.relayed_bytes == admitted.relayed_bytes == rows.nbytes
    assert admitted.early_bytes > 0.8 * admitted.relayed_bytes
    await client.settled()


async def test_a_second_request_with_the_same_prefix_executes_only_the_rest(client: Client, peer: DecodePeer) -> None:
    prompt = some_prompt(400)
    await events_of(client.prefill(a_ref(), prompt[:330]))
    before = (await client.settled()).counters["prefill_tokens_executed"]
    ref = a_ref()
    ticket, pages = peer.reserve(ref, client.node, len(prompt), resident_tokens=64)

    events = await events_of(client.prefill(ref, prompt, ticket=ticket))

    assert events[0].started.cached_tokens == 320
    assert (await client.settled()).counters["prefill_tokens_executed"] - before == 80
    admitted = await asyncio.wait_for(peer.admitted.get(), 20)
    assert admitted.cached_tokens == 320
    landed = peer.rows(pages, len(prompt)).numpy()[:, 64:]
    assert np.abs(landed - latents_of(prompt)[:, 64:]).max() < 1e-4


async def test_computed_blocks_are_published_and_known_as_this_nodes(client: Client, index: EmbeddedServer) -> None:
    prompt, seed = some_prompt(400), b"another-tenants!"
    await events_of(client.prefill(a_ref(), prompt, prefix_seed=seed))
    hashes = prefix_hash.chain(seed, np.array(prompt, dtype=np.int32), block_tokens=64)

    reader, node = PrefixReader(index.url, "default"), client.node.record.node
    this_node = Holding(Incarnation(node.name, node.start_id), Role.PREFILL, num_blocks=6)
    async with asyncio.timeout(20):
        while this_node not in (await reader.longest(hashes)).holdings:  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.05)
    await reader.close()
    assert (await client.stats()).counters["index_published"] >= 6


async def test_a_wholly_resident_prompt_seals_with_zero_bytes(client: Client, peer: DecodePeer) -> None:
    prompt, ref = some_prompt(100), a_ref()
    ticket, _ = peer.reserve(ref, client.node, 100, resident_tokens=100)

    events = await events_of(client.prefill(ref, prompt, ticket=ticket))

    assert events[-1].done.relayed_bytes == 0
    assert (await asyncio.wait_for(peer.admitted.get(), 20)).relayed_bytes == 0
    await client.settled()


@pytest.mark.parametrize("how", ["abort", "cancel", "decode"])
async def test_an_end_in_the_middle_returns_all_pages_on_both_sides(client: Client, peer: DecodePeer, how: str) -> None:
    prompt, ref = some_prompt(1800), a_ref()
    ticket, _ = peer.reserve(ref, client.node, len(prompt))
    call = client.prefill(ref, prompt, ticket=ticket)
    async for event in call:
        if event.WhichOneof("event") == "progress":
            break

    if how == "abort":
        reply = await client.stub.Abort(common_pb2.AbortRequest(request=ref, reason="by the test"))
        assert reply.was_active
        assert (await status_of(call)) == (grpc.StatusCode.CANCELLED, "by the test")
    elif how == "cancel":
        call.cancel()
    else:
        peer.hub.abort(request_of(ref), "decode gave up")
        code, text = await status_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "decode gave up" in text

    await client.settled()
    await peer.all_pages_free()


async def test_an_abort_is_legal_at_any_time_and_wins_over_a_late_prefill(client: Client) -> None:
    ref = a_ref()
    assert not (await client.stub.Abort(common_pb2.AbortRequest(request=ref))).was_active
    assert not (await client.stub.Abort(common_pb2.AbortRequest(request=ref))).was_active

    code, text = await status_of(client.prefill(ref, some_prompt(10)))

    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "attempt 1" in text


async def test_a_first_token_that_ends_the_request_leaves_nothing_reserved(client: Client, peer: DecodePeer) -> None:
    prompt, ref = recorded()["prompt_333"].tolist(), a_ref()
    ticket, _ = peer.reserve(ref, client.node, len(prompt))
    stop = int(recorded()["greedy_333"][0])
    sampling = common_pb2.Sampling(max_tokens=8, stop_token_ids=[stop])

    events = await events_of(client.prefill(ref, prompt, ticket=ticket, sampling=sampling))

    first = next(event.first_token for event in events if event.WhichOneof("event") == "first_token")
    assert (first.token.token_id, first.finish_reason) == (stop, common_pb2.FINISH_REASON_STOP)
    await asyncio.wait_for(peer.failed.get(), 20)
    await peer.all_pages_free()
    await client.settled()


async def test_requests_meant_for_others_or_wrong_in_themselves_are_refused(client: Client, peer: DecodePeer) -> None:
    other = common_pb2.Incarnation(name=client.node.record.node.name, start_id=1)
    prompt, ref = some_prompt(70), a_ref()
    ticket, _ = peer.reserve(ref, client.node, 70)
    garbled = type(ticket).FromString(ticket.SerializeToString())
    garbled.layout_fingerprint = b"x" * 16
    refusals = [
        (client.prefill(a_ref(), prompt, node=other), grpc.StatusCode.UNAVAILABLE, "this is"),
        (client.prefill(a_ref(), []), grpc.StatusCode.INVALID_ARGUMENT, "0 tokens"),
        (client.prefill(a_ref(), [10**6]), grpc.StatusCode.INVALID_ARGUMENT, "token id 1000000"),
        (client.prefill(a_ref(), some_prompt(2049)), grpc.StatusCode.INVALID_ARGUMENT, "2049 tokens"),
        (client.prefill(a_ref(), prompt, packed_ids=b"abc"), grpc.StatusCode.INVALID_ARGUMENT, "3 bytes"),
        (client.prefill(ref, prompt, ticket=garbled), grpc.StatusCode.FAILED_PRECONDITION, "layout"),
        (client.prefill(a_ref(), prompt, ticket=ticket), grpc.StatusCode.FAILED_PRECONDITION, "the ticket is for"),
        (client.prefill(ref, some_prompt(69), ticket=ticket), grpc.StatusCode.INVALID_ARGUMENT, "69"),
    ]

    for call, code, text in refusals:
        seen, details = await status_of(call)
        assert (seen, text in details) == (code, True), details

    peer.hub.abort(request_of(ref), "not used")


async def test_a_silent_holder_loses_its_request_and_a_renewing_one_keeps_it(client: Client, peer: DecodePeer) -> None:
    silent, renewed = a_ref(), a_ref()
    async with silent_decode_node() as endpoint:  # so the hand-offs wait
        calls = []
        for ref in (silent, renewed):
            ticket, _ = peer.reserve(ref, client.node, 70)
            ticket.decode_endpoint = endpoint
            calls.append(asyncio.create_task(status_of(client.prefill(ref, some_prompt(70), ticket=ticket))))
        holder = common_pb2.Incarnation(name="router-for-tests", start_id=7)
        await asyncio.sleep(0.3)
        renewal = common_pb2.RenewRequest(holder=holder, request_ids=[renewed.request_id, "another"])
        for _ in range(5):
            reply = await client.stub.Renew(renewal)
            assert (list(reply.unknown_request_ids), reply.lease_ms) == (["another"], 3000)
            await asyncio.sleep(0.8)

        code, text = await asyncio.wait_for(calls[0], 20)
        assert (code, "did not renew" in text) == (grpc.StatusCode.CANCELLED, True), text
        assert not calls[1].done()
        await client.stub.Abort(common_pb2.AbortRequest(request=renewed, reason="over"))
        assert await asyncio.wait_for(calls[1], 20) == (grpc.StatusCode.CANCELLED, "over")
        await client.settled()
    for ref in (silent, renewed):
        peer.hub.abort(request_of(ref), "over")
    await peer.all_pages_free()


async def test_a_burst_with_one_new_prefix_computes_it_once(client: Client) -> None:
    prefix = some_prompt(512)
    before = (await client.settled()).counters["prefill_tokens_executed"]

    await asyncio.gather(*(events_of(client.prefill(a_ref(), prefix + some_prompt(5))) for _ in range(12)))

    executed = (await client.settled()).counters["prefill_tokens_executed"] - before
    assert executed == 512 + 12 * 5


async def test_after_many_requests_ended_at_random_points_nothing_is_held(client: Client, peer: DecodePeer) -> None:
    rng = random.Random(5)
    prefixes = [some_prompt(256) for _ in range(3)]

    async def one(number: int) -> str:
        prompt, ref = rng.choice(prefixes) + some_prompt(rng.randrange(1, 200)), a_ref()
        ticket = peer.reserve(ref, client.node, len(prompt))[0] if number % 2 else None
        call = client.prefill(ref, prompt, ticket=ticket)
        try:
            if number % 3 == 0:
                await asyncio.sleep(rng.random() * 0.3)
                call.cancel()
            events = await events_of(call)
        except (asyncio.CancelledError, aio.AioRpcError) as err:
            if ticket is not None:
                peer.hub.abort(request_of(ref), "over")
            return "cancelled" if number % 3 == 0 else f"{ref.request_id}: {err}"
        return kinds(events)[-1] or ""

    for round_of in range(0, 40, 8):
        ends = await asyncio.gather(*(one(round_of + number) for number in range(8)))
        assert set(ends) <= {"done", "cancelled"}, ends
        await client.settled()
        while not peer.admitted.empty():
            peer.hub.released(peer.admitted.get_nowait().epoch)

    await peer.all_pages_free()
