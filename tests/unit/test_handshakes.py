"""Connections without a call are counted after a while; those with calls never are."""

from __future__ import annotations

import asyncio

from kvrelay.proto.handshakes import Handshakes

SETTLE_S = 0.02


async def counted(events: str) -> int:
    """Return how many failures come of: b = a connection, u = one with a call, c = another call over the last."""
    failed: list[None] = []
    handshakes = Handshakes(lambda: failed.append(None), settle_s=SETTLE_S)
    used = 0
    for event in events:
        if event != "c":
            handshakes.begun()
        if event in "uc":
            used += event == "u"
            handshakes.called(f"ipv4:127.0.0.1:{used}")
    await asyncio.sleep(4 * SETTLE_S)
    return len(failed)


async def test_every_connection_without_a_call_is_counted() -> None:
    assert await counted("bub" + "uub") == 3


async def test_calls_over_one_connection_count_once() -> None:
    assert await counted("ucccbb") == 2
    assert await counted("uccc") == 0


async def test_nothing_is_counted_before_its_time() -> None:
    failed: list[None] = []
    handshakes = Handshakes(lambda: failed.append(None), settle_s=10)
    handshakes.begun()
    await asyncio.sleep(SETTLE_S)
    assert not failed


async def test_a_failure_among_many_good_connections_is_seen_all_the_same() -> None:
    failed: list[None] = []
    handshakes = Handshakes(lambda: failed.append(None), settle_s=10 * SETTLE_S)
    handshakes.begun()
    for number in range(60):  # for as long as they come
        handshakes.begun()
        handshakes.called(f"ipv4:127.0.0.1:{number}")
        await asyncio.sleep(SETTLE_S / 4)
    assert len(failed) == 1
