"""A decode node and its prefill side, over one index server and one model per file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from decode_lab import (
    CPU,
    ORACLE,
    Lab,
    running,
)
from kvrelay.index.server import EmbeddedServer
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model
from oracle_data import MAX_MODEL_LEN, oracle_folder


@pytest.fixture(scope="module")
def index_url() -> Iterator[str]:
    server = EmbeddedServer.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(oracle_folder(ORACLE), dtype="float32", device=CPU, max_model_len=MAX_MODEL_LEN)


@pytest.fixture
async def lab(model: Model, index_url: str) -> AsyncIterator[Lab]:
    async with running(model, index_url) as made:
        yield made
