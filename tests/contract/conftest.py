"""Index servers for every suite that needs one, the reader of a hand-off over each transport, and prefill clients."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import warm_start
from contract.prefill_process import Client, DecodePeer, NodeProcess, decode_peer
from contract.prefill_requests import MODEL
from handoff_lab import Reader, reader
from kvrelay.index.server import EmbeddedServer
from oracle_data import FOLDER


def pytest_configure() -> None:
    warm_start.begin()


@pytest.fixture(params=["embedded", "redis-server"])
def program(request: pytest.FixtureRequest) -> Path | None:
    if request.param == "embedded":
        return None
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on this machine")
    return Path(found)


@pytest.fixture
def server(program: Path | None) -> Iterator[EmbeddedServer]:
    started = EmbeddedServer.start(program=program)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def index() -> Iterator[EmbeddedServer]:
    """One embedded server for a whole file."""
    started = EmbeddedServer.start()
    yield started
    started.stop()


@pytest.fixture(params=["loopback", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def decode(kind: str) -> AsyncIterator[Reader]:
    async with reader(kind) as side:
        yield side


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[Client]:
    """Of the prefill node that a file starts."""
    client = Client(node)
    yield client
    await client.close()


@pytest.fixture
async def peer() -> AsyncIterator[DecodePeer]:
    async with decode_peer(FOLDER / MODEL) as started:
        yield started
