"""The prefix index, against every index server: the one that comes with us, and a plain Redis where there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from index_lab import FLEET, A, B, a_writer
from kvrelay.core import prefix_hash
from kvrelay.core.supervise import watch_loop
from kvrelay.core.types import Incarnation, Role, Tier
from kvrelay.index import writer as writer_module
from kvrelay.index.reader import Confidence, Match, PrefixReader
from kvrelay.index.server import EmbeddedServer
from kvrelay.index.writer import PrefixWriter

HASHES = prefix_hash.chain(prefix_hash.seed(fingerprint=b"f" * 16), np.arange(40 * 64, dtype=np.int32), block_tokens=64)


@asynccontextmanager
async def a_reader(server: EmbeddedServer) -> AsyncIterator[PrefixReader]:
    reader = PrefixReader(server.url, FLEET)
    try:
        yield reader
    finally:
        await reader.close()


async def blocks_of(reader: PrefixReader, hashes: Sequence[bytes]) -> dict[str, int]:
    return {one.node.name: one.num_blocks for one in (await reader.longest(hashes)).holdings}


async def eventually(reader: PrefixReader, hashes: Sequence[bytes], wanted: dict[str, int]) -> None:
    for _ in range(1000):
        if await blocks_of(reader, hashes) == wanted:
            return
        await asyncio.sleep(0.02)
    assert await blocks_of(reader, hashes) == wanted


async def test_fleets_on_one_server_do_not_see_each_others_blocks(server: EmbeddedServer) -> None:
    async with a_writer(server, holding=HASHES), a_reader(server) as reader:
        await eventually(reader, HASHES, {"a": 40})
        other = PrefixReader(server.url, "other")

        assert (await other.longest(HASHES)).holdings == ()
        await other.close()


async def test_each_tier_of_a_node_is_a_holder_of_its_own(server: EmbeddedServer) -> None:
    async with a_writer(server) as near, a_writer(server, tier=Tier.HOST) as far, a_reader(server) as reader:
        near.publish(HASHES[:10])
        far.publish(HASHES[:30])
        async with asyncio.timeout(5):
            while True:
                answer = await reader.longest(HASHES)
                if {one.tier: one.num_blocks for one in answer.holdings} == {Tier.DEVICE: 10, Tier.HOST: 30}:
                    break
        assert {(one.node, one.role) for one in answer.holdings} == {(A, Role.PREFILL)}


async def test_the_longest_prefix_is_told_per_holder(server: EmbeddedServer) -> None:
    async with a_writer(server, A) as a, a_writer(server, B, Role.DECODE) as b, a_reader(server) as reader:
        a.publish(HASHES[:30])
        b.publish(HASHES[:1])
        await eventually(reader, HASHES, {"a": 30, "b": 1})

        answer = await reader.longest(HASHES)
        assert answer.confidence is Confidence.EXACT
        assert {(one.node, one.role) for one in answer.holdings} == {(A, Role.PREFILL), (B, Role.DECODE)}
        assert await blocks_of(reader, HASHES[:5]) == {"a": 5, "b": 1}
        assert await blocks_of(reader, []) == {"a": 0, "b": 0}


@pytest.mark.parametrize("missing", [0, 1, 8, 9, 39])
async def test_a_prefix_ends_at_the_first_block_that_is_missing(server: EmbeddedServer, missing: int) -> None:
    async with a_writer(server) as writer, a_reader(server) as reader:
        writer.publish(HASHES)
        writer.retract([HASHES[missing]])

        await eventually(reader, HASHES, {"a": missing})


async def test_publish_and_retract_take_effect_in_order(server: EmbeddedServer) -> None:
    async with a_writer(server) as writer, a_reader(server) as reader:
        for _ in range(3):
            writer.publish(HASHES)
            writer.retract(HASHES[3:])
        writer.publish(HASHES[3:7])

        await eventually(reader, HASHES, {"a": 7})


async def test_i4_a_prefix_of_4096_blocks_is_found_whole(server: EmbeddedServer) -> None:
    many = prefix_hash.chain(b"", np.arange(4096 * 64, dtype=np.int32), block_tokens=64)
    async with a_writer(server) as writer, a_reader(server) as reader:
        writer.publish(many)

        await eventually(reader, many, {"a": 4096})


async def test_i2_a_restarted_node_does_not_inherit_its_old_blocks(server: EmbeddedServer) -> None:
    reborn = Incarnation("a", 77)
    async with a_writer(server, A, holding=HASHES), a_reader(server) as reader:
        await eventually(reader, HASHES, {"a": 40})
        async with a_writer(server, reborn):
            await asyncio.sleep(0.1)

            found = {one.node: one.num_blocks for one in (await reader.longest(HASHES)).holdings}
            assert found == {A: 40, reborn: 0}


async def test_a_holder_whose_lease_is_over_is_forgotten(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LEASE_S", 0.1)
    async with a_writer(server, holding=HASHES), a_reader(server) as reader:
        await asyncio.sleep(0.4)

        assert (await reader.longest(HASHES)).holdings == ()


async def test_i1_blocks_come_back_after_the_server_restarted_empty(
    server: EmbeddedServer, program: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.1)
    async with a_writer(server, holding=HASHES[:5]) as writer, a_reader(server) as reader:
        await eventually(reader, HASHES, {"a": 5})
        server.stop()
        away = await reader.longest(HASHES)
        again = await asyncio.to_thread(EmbeddedServer.start, server.port, program=program)
        try:
            assert away.confidence is Confidence.FALLBACK
            await eventually(reader, HASHES, {"a": 5})
            assert (await reader.longest(HASHES)).confidence is Confidence.EXACT
            assert writer.counters.values["index_republished"] >= 1
        finally:
            again.stop()


async def test_an_overflowing_queue_is_counted_and_heals(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_writer(server, holding=HASHES[:20]) as writer, a_reader(server) as reader:
        await eventually(reader, HASHES, {"a": 20})
        monkeypatch.setattr(writer_module, "MAX_PENDING", 10)
        writer.retract(HASHES[:20])

        assert writer.counters.values["index_dropped"] == 20
        await eventually(reader, HASHES, {"a": 20})


async def test_an_incomplete_holder_makes_the_answer_degraded(server: EmbeddedServer) -> None:
    async with a_reader(server) as reader:
        # A writer that is stopped in the middle of giving everything again.
        release = asyncio.Event()
        writer = SlowWriter(server.url, FLEET, node=A, role=Role.PREFILL, all_hashes=lambda: HASHES)
        writer.release = release
        writer.publish([HASHES[0]] * (writer_module.MAX_PENDING + 1))
        await writer.start()
        await eventually(reader, HASHES, {"a": 0})
        during = await reader.longest(HASHES)
        release.set()
        await eventually(reader, HASHES, {"a": 40})
        after = await reader.longest(HASHES)
        await writer.stop()

    assert (during.confidence, after.confidence) == (Confidence.DEGRADED, Confidence.EXACT)


class SlowWriter(PrefixWriter):
    """Waits after each command that it has sent."""

    release: asyncio.Event

    async def _send(self, operations: list[bytes]) -> bool:
        was_there = await super()._send(operations)
        await self.release.wait()
        return was_there


async def test_a_silent_server_costs_a_request_no_more_than_the_time_limit(server: EmbeddedServer) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    firsts_s, seconds_s = [], []
    for _ in range(3):  # the least of some: others on this machine only ever add
        reader = PrefixReader(f"redis://127.0.0.1:{port}/0", FLEET)
        first_s, first = await timed(partial(reader.longest, HASHES))
        second_s, second = await timed(partial(reader.longest, HASHES))
        assert first.confidence is second.confidence is Confidence.FALLBACK
        firsts_s.append(first_s)
        seconds_s.append(second_s)

    assert min(firsts_s) < 0.35
    assert min(seconds_s) < 0.05  # nobody waits for a server that has just failed to answer
    await reader.close()
    silent.close()


async def timed(ask: Callable[[], Awaitable[Match]]) -> tuple[float, Match]:
    began_s = time.monotonic()
    answer = await ask()
    return time.monotonic() - began_s, answer


async def test_a_cancelled_command_is_cancelled(server: EmbeddedServer) -> None:
    reader = PrefixReader(server.url, FLEET)
    for num_switches in range(0, 60, 3):  # wherever the command is when the cancellation comes

        async def ask_and_go_on() -> None:
            await reader.longest(HASHES)
            await asyncio.sleep(5)

        task = asyncio.create_task(ask_and_go_on())
        for _ in range(num_switches):
            await asyncio.sleep(0)
        task.cancel()

        done, _ = await asyncio.wait([task], timeout=20)
        assert done, num_switches
    await reader.close()


async def test_a_bug_in_the_writer_is_told_and_does_not_end_it_silently(server: EmbeddedServer) -> None:
    bugs: list[str] = []
    nothing: dict[str, list[bytes]] = {}
    watch_loop(asyncio.get_running_loop(), bugs.append)
    writer = PrefixWriter(server.url, FLEET, node=A, role=Role.PREFILL, all_hashes=lambda: nothing["lost"])
    await writer.start()
    writer.publish([HASHES[0]] * (writer_module.MAX_PENDING + 1))  # too much to queue: all is to be given again
    await asyncio.sleep(0.2)

    assert bugs == ["the task prefix writer was ended by a bug: KeyError: 'lost'"]
    await writer.stop()
