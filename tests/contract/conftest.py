"""Index servers for every suite that needs one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.index.server import EmbeddedServer


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
