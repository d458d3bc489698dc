"""How a node's time in a role ends: leaving wins over a change of role, and a change that cannot be is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.core.drain import DrainRequests, drained_for
from kvrelay.core.errors import InvalidRequestError, SettingsError
from kvrelay.core.lifecycle import Ending, StopSignals
from kvrelay.core.settings import in_other_role, load
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.prefill_node.settings import PrefillSettings


async def test_a_drain_ends_the_process() -> None:
    asked = DrainRequests(StopSignals())
    asked.ask()
    await asyncio.wait_for(asked.wait(), 20)
    assert asked.ending is Ending.LEAVES


async def test_a_change_of_role_is_refused_where_there_is_no_other_role() -> None:
    asked = DrainRequests(StopSignals(), why_no_switch="a ring of 2 ranks")
    with pytest.raises(InvalidRequestError, match="a ring of 2 ranks"):
        asked.ask(switch_role=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked.wait(), 0.01)


async def test_who_is_also_asked_to_leave_does_not_change_its_role() -> None:
    asked = DrainRequests(StopSignals(), why_no_switch="")
    asked.ask(switch_role=True)
    await asyncio.wait_for(asked.wait(), 20)
    endings = [asked.ending]
    asked.ask()
    assert [*endings, asked.ending] == [Ending.SWITCHES, Ending.LEAVES]


async def test_who_was_asked_to_leave_refuses_a_change_of_role() -> None:
    asked = DrainRequests(StopSignals(), why_no_switch="")
    asked.ask()
    with pytest.raises(InvalidRequestError, match="asked to leave"):
        asked.ask(switch_role=True)
    assert asked.ending is Ending.LEAVES


async def test_a_change_of_role_is_carried_out_once() -> None:
    asked = DrainRequests(StopSignals(), why_no_switch="")
    asked.ask(switch_role=True)
    asked.role_decided()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked.wait(), 0.01)


class DrainedAtOnce:
    """A node whose pool peers may still reach for the first `busy` times that somebody asks."""

    active_requests = 0

    def __init__(self, asked: DrainRequests, *, busy: int) -> None:
        self._asked, self._busy = asked, busy
        self.drains = self.returns = 0

    @property
    def why_not_elsewhere(self) -> str:
        self._busy -= 1
        return "a pull has no end yet" if self._busy >= 0 else ""

    async def drained(self) -> None:
        self.drains += 1

    def serve_again(self) -> None:
        self.returns += 1
        self._asked.ask()


async def test_a_node_changes_its_role_once_the_data_plane_has_let_go() -> None:
    asked = DrainRequests(StopSignals(), why_no_switch="")
    node = DrainedAtOnce(asked, busy=2)
    asked.ask(switch_role=True)

    assert await asyncio.wait_for(drained_for(node, asked), 20) is Ending.SWITCHES
    assert node.returns == 0


async def test_a_node_whose_pages_may_still_be_written_keeps_its_role_and_serves_again() -> None:
    asked = DrainRequests(StopSignals(), why_no_switch="")
    node = DrainedAtOnce(asked, busy=1_000_000)
    asked.ask(switch_role=True)

    assert await asyncio.wait_for(drained_for(node, asked), 20) is Ending.LEAVES  # as `serve_again` asks for
    assert (node.drains, node.returns) == (2, 1)


async def test_who_leaves_waits_for_no_peer() -> None:
    asked = DrainRequests(StopSignals(), why_no_switch="")
    node = DrainedAtOnce(asked, busy=1_000_000)
    asked.ask()

    assert await asyncio.wait_for(drained_for(node, asked), 20) is Ending.LEAVES


def test_the_other_role_has_the_same_common_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_PREFILL_CHUNK_TOKENS", "512")
    monkeypatch.setenv("KVRELAY_PREFILL_LISTEN", "127.0.0.1:1")  # of another process that this machine may run
    options = ["--model", "/m", "--listen", "127.0.0.1:8402", "--pool-pages", "7", "--lease-s", "3"]
    decode = load(DecodeSettings, options, prog="decode")

    prefill = in_other_role(PrefillSettings, decode, ring_size=1)

    assert (prefill.model, prefill.listen, prefill.pool_pages, prefill.lease_s) == ("/m", "127.0.0.1:8402", 7, 3)
    assert (prefill.ring_size, prefill.chunk_tokens) == (1, 512)


def test_a_wrong_variable_of_the_other_role_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_PREFILL_MAX_QUEUED_REQUESTS", "none")
    decode = load(DecodeSettings, ["--model", "/m"], prog="decode")
    with pytest.raises(SettingsError, match="KVRELAY_PREFILL_MAX_QUEUED_REQUESTS: 'none' is not a whole number"):
        in_other_role(PrefillSettings, decode, ring_size=1)
