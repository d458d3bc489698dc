"""A prefill node, alone or a ring, writes cached blocks into the pages of a node that asks for them: real NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from grpc import aio

from contract.prefill_process import Client, DecodePeer, NodeProcess, decode_peer, prefill_node, silent_decode_node
from contract.prefill_requests import (
    CHUNK,
    MODEL,
    NEEDS_RECORDING,
    a_ref,
    events_of,
    latents_of,
    request_of,
    some_prompt,
)
from contract.ring_ranks import RecordingWriter, a_pool
from kvrelay.core import prefix_hash
from kvrelay.core.types import Counters
from kvrelay.index.server import EmbeddedServer
from kvrelay.model.checkpoint import load_model
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.group import Leave
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.ring import Ring
from kvrelay.proto.convert import pack_ids
from kvrelay.proto.v1 import blocks_pb2, handoff_pb2, ring_pb2
from oracle_data import FOLDER

pytestmark = NEEDS_RECORDING
TENANT = b"tenant-of-tests!"
TOKENS = 320  # five blocks


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "ring-of-2"])
def node(request: pytest.FixtureRequest, index: EmbeddedServer) -> Iterator[NodeProcess]:
    options = ("--chunk-tokens", str(CHUNK), "--max-request-s", "60")
    name = f"source-{request.param}"
    with prefill_node(FOLDER / MODEL, *options, ring_size=request.param, index_url=index.url, name=name) as started:
        yield started


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[DecodePeer]:
    async with decode_peer(FOLDER / MODEL, name="asks-for-blocks", wants_token=False) as started:
        yield started


def names(prompt: list[int]) -> list[bytes]:
    return prefix_hash.chain(TENANT, np.array(prompt, dtype=np.int32), block_tokens=64)


async def refused(call: aio.UnaryUnaryCall[blocks_pb2.PushRequest, blocks_pb2.PushReply]) -> tuple[object, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


@pytest.mark.parametrize("resident", [0, 128])
async def test_cached_blocks_land_in_the_pages_of_the_node_that_asks(
    client: Client, peer: DecodePeer, resident: int
) -> None:
    prompt, ref = some_prompt(TOKENS + 5), a_ref()
    await events_of(client.prefill(a_ref(), prompt, prefix_seed=TENANT))
    before = (await client.settled()).counters
    ticket, pages = peer.reserve(ref, client.node, TOKENS, resident_tokens=resident)

    reply = await client.blocks.Push(blocks_pb2.PushRequest(ticket=ticket, block_hashes=names(prompt)))

    assert reply.pushed_tokens == TOKENS - resident
    admitted = await asyncio.wait_for(peer.admitted.get(), 5)
    assert admitted.first_token is None
    landed = peer.rows(pages, TOKENS).numpy()[:, resident:]
    assert np.abs(landed - latents_of(prompt[:TOKENS])[:, resident:]).max() < 1e-4
    peer.hub.released(admitted.epoch)
    await peer.all_pages_free()
    after = (await client.settled()).counters
    assert after["prefill_tokens_executed"] == before["prefill_tokens_executed"]
    assert after["pushed_tokens_total"] - before.get("pushed_tokens_total", 0.0) == TOKENS - resident


async def test_of_the_pages_of_blocks_only_those_are_written_that_are_asked_for(
    client: Client, peer: DecodePeer
) -> None:
    """As a rank of a ring that asks does, which owns some of them, in any order."""
    prompt, ref = some_prompt(TOKENS + 5), a_ref()
    await events_of(client.prefill(a_ref(), prompt, prefix_seed=TENANT))
    ticket, pages = peer.reserve(ref, client.node, 3 * 64)
    picked = [handoff_pb2.PageRun(first_page=3, num_pages=2), handoff_pb2.PageRun(first_page=1, num_pages=1)]
    asked = blocks_pb2.PushRequest(ticket=ticket, block_hashes=names(prompt), pages=picked)

    assert (await client.blocks.Push(asked)).pushed_tokens == 3 * 64

    peer.hub.released((await asyncio.wait_for(peer.admitted.get(), 5)).epoch)
    wanted = latents_of(prompt[:TOKENS])
    wanted = np.concatenate((wanted[:, 192:], wanted[:, 64:128]), axis=1)
    assert np.abs(peer.rows(pages, 3 * 64).numpy() - wanted).max() < 1e-4
    await client.settled()
    asked.pages[1].first_page = 5
    code, text = await refused(client.blocks.Push(asked))
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "page 5 of 5 blocks is asked for")


async def test_a_request_whose_name_the_source_knows_is_another_matter(client: Client, peer: DecodePeer) -> None:
    """The same attempt may have been there before, or be there now."""
    prompt, ref = some_prompt(TOKENS + 5), a_ref()
    await events_of(client.prefill(ref, prompt, prefix_seed=TENANT))
    ticket, _ = peer.reserve(ref, client.node, TOKENS)

    assert (await client.blocks.Push(blocks_pb2.PushRequest(ticket=ticket, block_hashes=names(prompt)))).pushed_tokens

    peer.hub.released((await peer.admitted.get()).epoch)
    await client.settled()


async def test_blocks_that_are_not_here_and_tickets_of_others_are_refused(client: Client, peer: DecodePeer) -> None:
    prompt, ref = some_prompt(TOKENS), a_ref()
    ticket, _ = peer.reserve(ref, client.node, TOKENS)
    request = blocks_pb2.PushRequest(ticket=ticket, block_hashes=names(prompt))
    code, text = await refused(client.blocks.Push(request))
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, "0 of 5 blocks are here")

    for change, wanted, why in (
        (handoff_pb2.Ticket(ring_size=7), grpc.StatusCode.FAILED_PRECONDITION, "7 ranks"),
        (handoff_pb2.Ticket(layout_fingerprint=b"x" * 16), grpc.StatusCode.FAILED_PRECONDITION, "layout 7878"),
        (handoff_pb2.Ticket(prompt_tokens=64), grpc.StatusCode.INVALID_ARGUMENT, "64 tokens, 5 blocks"),
        (handoff_pb2.Ticket(timeout_ms=61_000), grpc.StatusCode.INVALID_ARGUMENT, "61 s; at most 60"),
    ):
        changed = handoff_pb2.Ticket()
        changed.CopyFrom(ticket)
        changed.MergeFrom(change)
        code, text = await refused(
            client.blocks.Push(blocks_pb2.PushRequest(ticket=changed, block_hashes=request.block_hashes))
        )
        assert (code, why in text) == (wanted, True), text
    peer.hub.abort(request_of(ref), "not used")
    await peer.all_pages_free()
    await client.settled()


async def test_an_asker_that_goes_away_pins_nothing(client: Client, peer: DecodePeer) -> None:
    prompt, ref = some_prompt(TOKENS + 5), a_ref()
    await events_of(client.prefill(a_ref(), prompt, prefix_seed=TENANT))
    ticket, _ = peer.reserve(ref, client.node, TOKENS)
    async with silent_decode_node() as endpoint:
        ticket.decode_endpoint = endpoint
        call = client.blocks.Push(blocks_pb2.PushRequest(ticket=ticket, block_hashes=names(prompt)))
        async with asyncio.timeout(5):
            while not (await client.stats()).sessions.get("pushing"):  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(0.05)
        assert (await client.stats()).pinned_pages == TOKENS // 64

        call.cancel()

        await client.settled()
    peer.hub.abort(request_of(ref), "gone")
    await peer.all_pages_free()


def test_a_push_leaves_between_the_layers_of_a_chunk_in_work() -> None:
    """The node that asks waits for it, and a chunk may take seconds."""
    model = load_model(FOLDER / MODEL, dtype="float32", device=torch.device("cpu"))
    pool, counters = a_pool(model), Counters()
    writers: list[RecordingWriter] = []

    def open_writer(_: handoff_pb2.Ticket) -> RecordingWriter:
        writers.append(RecordingWriter(pool))
        return writers[-1]

    planner = ChunkPlanner(rank=0, ring_size=1, align_tokens=1, ring_block_tokens=4096, device=pool.device)
    worker = RankWorker(
        model, pool, Ring(None, pool, counters), open_writer=open_writer, planner=planner, counters=counters
    )
    step = ring_pb2.RingStep(step_id=1)
    step.opens.add(request={"request_id": "computes", "attempt": 1}, prompt_tokens=128)
    step.chunk.request_id = "computes#1"
    step.chunk.tokens.end = 64
    step.chunk.packed_ids = pack_ids(range(64))
    step.chunk.new_pages.add(prompt_page=0, rank=0, first_page=9, num_pages=1)
    step.pushes.add(
        key="push",
        pages=[ring_pb2.OwnedRun(prompt_page=0, rank=0, first_page=0, num_pages=5)],
        ticket=handoff_pb2.Ticket(prompt_tokens=TOKENS, resident_tokens=64),
    )

    worker.run(step, lambda *_: Leave.NO)

    assert writers[0].sealed_with == (None, 0)
    assert len(writers[0].rows) == len(model.layers) * (TOKENS - 64)
    assert counters.values["relay_pending"] == 0
