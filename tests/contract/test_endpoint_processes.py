"""Writers that are stopped or killed in mid write: nothing of theirs reaches a page in use."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

import handoff_writer
from handoff_lab import PATIENT_S, Reader, reader, until
from kvrelay.core.types import Epoch, Incarnation
from kvrelay.kv_transfer.values import Request
from transport_party import KINDS

NUM_PAGES = 20_000  # 92 MB
PROMPT_TOKENS = NUM_PAGES * 8


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in KINDS[request.param].items():
        monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.fixture
async def decode(kind: str) -> AsyncIterator[Reader]:
    async with reader(kind, num_pages=NUM_PAGES) as side:
        yield side


class NextOwner:
    """Takes the pages the moment they are free and fills them with its own bytes."""

    def __init__(self, decode: Reader) -> None:
        self._memory = decode.memory.view
        self.epochs: list[Epoch] = []
        decode.on_free = self._take

    def _take(self, epoch: Epoch) -> None:
        self._memory[:] = b"\x5a" * len(self._memory)
        self.epochs.append(epoch)

    def undisturbed(self) -> bool:
        return self._memory == b"\x5a" * len(self._memory)


async def test_a_stopped_writer_that_goes_on_after_the_abort_disturbs_nobody(kind: str, decode: Reader) -> None:
    next_owner = NextOwner(decode)
    ticket = decode.reserve(
        "r", writer=Incarnation.new("prefill"), prompt_tokens=PROMPT_TOKENS, timeout_s=PATIENT_S, lease_s=PATIENT_S
    )
    writer = handoff_writer.start(kind, ticket, num_pages=NUM_PAGES)
    assert writer.stdout is not None
    try:
        assert await asyncio.to_thread(writer.stdout.readline) == "posting\n"
        os.kill(writer.pid, signal.SIGSTOP)
        decode.hub.abort(Request("r", 1), "redone elsewhere")
        await until(lambda: decode.hub.stats().quarantined_pages or next_owner.epochs, within_s=20)
        assert next_owner.epochs == []  # no fence, no pages

        os.kill(writer.pid, signal.SIGCONT)
        await until(lambda: next_owner.epochs)
        assert "redone elsewhere" in await asyncio.to_thread(writer.stdout.readline)
        await asyncio.sleep(0.5)
    finally:
        writer.kill()
        writer.wait()

    assert next_owner.undisturbed()


async def test_a_killed_writers_pages_come_back_once_nothing_of_it_can_land(kind: str, decode: Reader) -> None:
    next_owner = NextOwner(decode)
    prefill = Incarnation.new("prefill")
    ticket = decode.reserve("r", writer=prefill, prompt_tokens=PROMPT_TOKENS, timeout_s=PATIENT_S, lease_s=PATIENT_S)
    writer = handoff_writer.start(kind, ticket, num_pages=NUM_PAGES)
    assert writer.stdout is not None
    assert await asyncio.to_thread(writer.stdout.readline) == "posting\n"

    writer.kill()
    writer.wait()
    await until(lambda: decode.failed or decode.admitted)
    assert decode.admitted == []
    assert next_owner.epochs == []
    decode.hub.writer_dead(prefill, "reaped by its supervisor")
    await until(lambda: next_owner.epochs)
    await asyncio.sleep(0.5)

    assert next_owner.undisturbed()
