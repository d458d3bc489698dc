"""Prefill nodes, alone and rings, fetch a cached prefix from each other: every rank its own pages, over real NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from contract.prefill_process import Client, NodeProcess, decode_peer, prefill_node
from contract.prefill_requests import (
    CHUNK,
    MODEL,
    NEEDS_RECORDING,
    a_ref,
    events_of,
    kinds,
    latents_of,
    some_prompt,
)
from kvrelay.cli import certs
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import prefill_pb2
from oracle_data import FOLDER

pytestmark = NEEDS_RECORDING
TOKENS = 700
WHOLE = TOKENS // 64 * 64
OPTIONS = ("--chunk-tokens", str(CHUNK))


@pytest.fixture(scope="module")
def nodes(index: EmbeddedServer) -> Iterator[dict[int, NodeProcess]]:
    """Nodes by ring size, that all can fetch."""
    with ExitStack() as stack:
        yield {
            size: stack.enter_context(
                prefill_node(FOLDER / MODEL, *OPTIONS, ring_size=size, index_url=index.url, name=f"ring-{size}")
            )
            for size in (1, 2, 3)
        }


@pytest_asyncio.fixture
async def clients(nodes: dict[int, NodeProcess]) -> AsyncIterator[dict[int, Client]]:
    made = {size: Client(node) for size, node in nodes.items()}
    yield made
    for client in made.values():
        await client.close()


def from_node(client: Client, *, tokens: int = TOKENS) -> prefill_pb2.PullFrom:
    record = client.node.record
    return prefill_pb2.PullFrom(
        node=record.node, endpoint=client.node.endpoint, tokens=tokens, ring_size=record.ring_size
    )


@pytest.mark.parametrize(("source", "asker"), [(1, 3), (3, 1), (2, 3), (3, 2)])
async def test_a_prefix_is_fetched_between_rings_of_any_two_sizes(
    clients: dict[int, Client], source: int, asker: int
) -> None:
    prompt, ref = some_prompt(TOKENS), a_ref()
    await events_of(clients[source].prefill(a_ref(), prompt))
    await events_of(clients[asker].prefill(a_ref(), prompt[:130]))  # two blocks of it are there already
    before = (await clients[asker].settled()).counters
    async with decode_peer(FOLDER / MODEL) as peer:
        ticket, pages = peer.reserve(ref, clients[asker].node, TOKENS)

        events = await events_of(
            clients[asker].prefill(ref, prompt, ticket=ticket, pull_from=from_node(clients[source]))
        )

        assert kinds(events)[-1] == "done"
        assert (events[0].started.cached_tokens, events[0].started.pulled_tokens) == (WHOLE, WHOLE - 128)
        await asyncio.wait_for(peer.admitted.get(), 5)
        assert np.abs(peer.rows(pages, TOKENS).numpy() - latents_of(prompt)).max() < 1e-4
    after = (await clients[asker].settled()).counters
    assert after["prefill_tokens_executed"] - before["prefill_tokens_executed"] == TOKENS - WHOLE
    assert after["pulled_tokens_total"] - before.get("pulled_tokens_total", 0.0) == WHOLE - 128
    await clients[source].settled()
    again = await events_of(clients[asker].prefill(a_ref(), prompt))  # it stays cached
    assert again[0].started.cached_tokens == WHOLE


async def test_a_source_that_has_forgotten_costs_a_ring_no_answer_and_no_page(clients: dict[int, Client]) -> None:
    prompt = some_prompt(TOKENS)

    events = await events_of(clients[3].prefill(a_ref(), prompt, pull_from=from_node(clients[2])))

    assert (events[0].started.cached_tokens, events[0].started.pulled_tokens) == (0, 0)
    assert kinds(events)[-1] == "done"
    stats = await clients[3].settled(within_s=30)
    assert stats.counters["pulls_failed_total"] >= 1


async def test_requests_with_the_prefix_that_a_ring_fetches_wait_for_it(clients: dict[int, Client]) -> None:
    prompt = some_prompt(TOKENS)
    await events_of(clients[2].prefill(a_ref(), prompt))
    before = (await clients[3].settled()).counters

    tails = [prompt + some_prompt(70) for _ in range(6)]
    source = from_node(clients[2])
    await asyncio.gather(*(events_of(clients[3].prefill(a_ref(), one, pull_from=source)) for one in tails))

    after = (await clients[3].settled()).counters
    assert after["pulled_tokens_total"] - before.get("pulled_tokens_total", 0.0) == WHOLE
    assert after["prefill_tokens_executed"] - before["prefill_tokens_executed"] == 6 * (TOKENS + 70 - WHOLE)


async def test_further_ranks_of_a_ring_are_served_over_tls_too(index: EmbeddedServer, tmp_path: Path) -> None:
    certs.make(tmp_path / "certs", days=1)
    ca, cert, key = (str(tmp_path / "certs" / name) for name in ("ca.pem", "member.pem", "member.key"))
    secure, tls = ("--tls-ca", ca, "--tls-cert", cert, "--tls-key", key), Tls.load(ca=ca, cert=cert, key=key)
    prompt = some_prompt(TOKENS)
    with ExitStack() as stack:
        source, asker = (
            Client(
                stack.enter_context(
                    prefill_node(
                        FOLDER / MODEL, *OPTIONS, *secure, ring_size=size, index_url=index.url, name=f"secure-{size}"
                    )
                ),
                tls=tls,
            )
            for size in (1, 2)
        )
        await events_of(source.prefill(a_ref(), prompt))

        events = await events_of(asker.prefill(a_ref(), prompt, pull_from=from_node(source)))

        assert events[0].started.pulled_tokens == WHOLE
        await source.close()
        await asker.close()
