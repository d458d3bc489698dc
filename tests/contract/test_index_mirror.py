"""A router's own copy of the index, against every index server: what it knows, and how sure it says it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from redis import Redis

from index_lab import FLEET, A, B, a_writer
from kvrelay.core import prefix_hash
from kvrelay.core.types import Role, Tier
from kvrelay.index import changes as changes_module
from kvrelay.index import mirror as mirror_module
from kvrelay.index import writer as writer_module
from kvrelay.index.client import Keys, holder_id
from kvrelay.index.lookup import PrefixIndex
from kvrelay.index.mirror import IndexMirror
from kvrelay.index.reader import Confidence, PrefixReader
from kvrelay.index.server import EmbeddedServer
from kvrelay.index.writer import PrefixWriter

KEYS = Keys(FLEET)


def chain_of(num_blocks: int, *, first: int = 0) -> list[bytes]:
    ids = np.arange(first, first + num_blocks * 64, dtype=np.int32)
    return prefix_hash.chain(b"", ids, block_tokens=64)


HASHES = chain_of(40)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (writer_module, "KEEPALIVE_S", 0.1),
        (writer_module, "_RETRY_S", 0.1),
        (mirror_module, "_BLOCK_S", 0.05),
        (mirror_module, "_RETRY_S", 0.05),
        (mirror_module, "_SNAPSHOT_PAUSE_S", 0.05),
        (mirror_module, "_ROLL_CALL_S", 0.2),
    ):
        monkeypatch.setattr(module, name, value)


@asynccontextmanager
async def an_index(server: EmbeddedServer, *, max_blocks: int = 100_000) -> AsyncIterator[PrefixIndex]:
    index = PrefixIndex(IndexMirror(server.url, FLEET, max_blocks=max_blocks), PrefixReader(server.url, FLEET))
    await index.start()
    try:
        yield index
    finally:
        await index.stop()


def held(index: PrefixIndex, hashes: Sequence[bytes] = HASHES) -> dict[str, int]:
    return {one.node.name: one.num_blocks for one in index.mirror.longest(hashes)}


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is on the other side of a connection
            await asyncio.sleep(0.01)


async def exactly(index: PrefixIndex, wanted: dict[str, int], hashes: Sequence[bytes] = HASHES) -> None:
    await until(lambda: index.mirror.is_exact and held(index, hashes) == wanted)


def told(index: PrefixIndex, name: str) -> float:
    return index.mirror.counters.values.get(f"index_mirror_{name}", 0)


async def test_a_mirror_follows_what_holders_publish_and_retract(server: EmbeddedServer) -> None:
    async with an_index(server) as index, a_writer(server, A) as a, a_writer(server, B, Role.DECODE) as b:
        a.publish(HASHES[:30])
        b.publish(HASHES[:3])
        await exactly(index, {"a": 30, "b": 3})
        a.retract(HASHES[7:])
        await exactly(index, {"a": 7, "b": 3})

        answer = await index.longest(HASHES)
        assert answer.confidence is Confidence.EXACT
        assert {(one.node, one.role) for one in answer.holdings} == {(A, Role.PREFILL), (B, Role.DECODE)}
        assert told(index, "gaps") == 0


async def test_a_mirror_follows_each_tier_by_changes_and_by_snapshot(server: EmbeddedServer) -> None:
    def tiers(index: PrefixIndex) -> dict[Tier, int]:
        return {one.tier: one.num_blocks for one in index.mirror.longest(HASHES)}

    async with a_writer(server) as near, a_writer(server, tier=Tier.HOST) as far, an_index(server) as index:
        near.publish(HASHES[:20])
        far.publish(HASHES[:20])
        await until(lambda: index.mirror.is_exact and tiers(index) == {Tier.DEVICE: 20, Tier.HOST: 20})
        near.retract(HASHES[5:20])  # to host memory: nothing else has to be told
        await until(lambda: tiers(index) == {Tier.DEVICE: 5, Tier.HOST: 20})
        async with an_index(server) as late:
            await until(lambda: tiers(late) == {Tier.DEVICE: 5, Tier.HOST: 20})


async def test_a_mirror_that_comes_late_reads_what_was_published_before(server: EmbeddedServer) -> None:
    async with a_writer(server, holding=HASHES):
        await asyncio.sleep(0.1)
        async with an_index(server) as index:
            await exactly(index, {"a": 40})


async def test_a_node_that_leaves_is_forgotten_at_once_and_the_rest_stays_exact(server: EmbeddedServer) -> None:
    async with an_index(server) as index, a_writer(server, A, holding=HASHES[:5]):
        async with a_writer(server, B, holding=HASHES):
            await exactly(index, {"a": 5, "b": 40})
        await exactly(index, {"a": 5})


async def test_a_holder_whose_lease_ran_out_is_forgotten_without_making_the_rest_doubtful(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "KEEP_S", 0.2)
    async with an_index(server) as index, a_writer(server, A, holding=HASHES[:5]):
        dead = PrefixWriter(server.url, FLEET, node=B, role=Role.PREFILL, all_hashes=lambda: HASHES)
        await dead.start()
        dead.publish(HASHES)
        await exactly(index, {"a": 5, "b": 40})
        assert dead._task is not None
        dead._task.cancel()
        blocks = Redis.from_url(server.url)
        blocks.delete(KEYS.blocks_prefix.encode() + holder_id(B, Role.PREFILL))

        await exactly(index, {"a": 5})
        await dead._redis.aclose()


async def test_a_trimmed_stream_is_a_gap_that_a_snapshot_heals(server: EmbeddedServer) -> None:
    redis, held_by_a = Redis.from_url(server.url), list(HASHES[:2])
    async with an_index(server) as index, a_writer(server, A, holding=held_by_a) as writer:
        await exactly(index, {"a": 2})
        snapshots = told(index, "snapshots")
        # The stream's last entries vanish before the mirror has read them: as when it is trimmed under a burst.
        tail = redis.incrby(KEYS.last_change, 3)
        assert tail > 3
        await until(lambda: told(index, "gaps") > 0)
        held_by_a += HASHES[2:9]
        writer.publish(HASHES[2:9])

        await exactly(index, {"a": 9})
        assert told(index, "snapshots") > snapshots


async def test_more_changes_than_the_stream_keeps_end_in_the_same_state(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "MAX_ENTRIES", 5)
    many = chain_of(5000)
    async with an_index(server) as index, a_writer(server) as writer:
        for at in range(0, len(many), 10):
            writer.publish(many[at : at + 10])
            writer.retract([many[at]])
            writer.publish([many[at]])
        await exactly(index, {"a": 5000}, many)

        assert Redis.from_url(server.url).xlen(KEYS.changes) < 200


async def test_i1_a_server_that_restarts_empty_costs_confidence_and_no_hits(
    server: EmbeddedServer, program: Path | None
) -> None:
    async with an_index(server) as index, a_writer(server, holding=HASHES):
        await exactly(index, {"a": 40})
        server.stop()
        await until(lambda: not index.mirror.is_exact)
        away = await index.longest(HASHES)
        again = await asyncio.to_thread(EmbeddedServer.start, server.port, program=program)
        try:
            assert away.confidence is Confidence.DEGRADED
            assert [one.num_blocks for one in away.holdings] == [40]
            await exactly(index, {"a": 40})
        finally:
            again.stop()


async def test_without_server_and_without_memory_the_answer_is_fallback() -> None:
    url = "redis://127.0.0.1:1/0"
    index = PrefixIndex(IndexMirror(url, FLEET), PrefixReader(url, FLEET))
    await index.start()
    answer = await index.longest(HASHES)
    await index.stop()

    assert (answer.holdings, answer.confidence) == ((), Confidence.FALLBACK)


async def test_what_the_server_evicts_is_told_again_and_is_never_a_wrong_exact_hit(server: EmbeddedServer) -> None:
    redis = Redis.from_url(server.url)
    redis.config_set("maxmemory-policy", "allkeys-lru")
    held_by_a = chain_of(2000)
    async with an_index(server) as index, a_writer(server, A, holding=held_by_a) as writer:
        await exactly(index, {"a": 2000}, held_by_a)
        # Tiny: the blocks do not fit beside what the server needs for itself.
        redis.config_set("maxmemory", redis.info("memory")["used_memory"] + (64 << 10))
        for at in range(20):
            more = chain_of(2000, first=(at + 1) * 1_000_000)
            writer.publish(more)
            await asyncio.sleep(0.02)
            writer.retract(more)
        assert redis.info("stats")["evicted_keys"] > 0
        answer = await index.longest(held_by_a)
        assert {one.num_blocks for one in answer.holdings} <= {0, 2000}
        redis.config_set("maxmemory", 0)

        await exactly(index, {"a": 2000}, held_by_a)


async def test_a_full_server_that_refuses_writes_costs_hits_and_no_errors(server: EmbeddedServer) -> None:
    redis = Redis.from_url(server.url)
    redis.config_set("maxmemory-policy", "noeviction")
    holding: list[bytes] = []
    async with an_index(server) as index, a_writer(server, holding=holding) as writer:
        await exactly(index, {"a": 0})
        redis.config_set("maxmemory", 1)
        holding += HASHES
        writer.publish(HASHES)
        await asyncio.sleep(0.3)
        assert (await index.longest(HASHES)).confidence in Confidence
        redis.config_set("maxmemory", 0)

        await exactly(index, {"a": 40})


async def test_i7_a_mirror_that_is_too_small_says_so_and_the_server_is_asked(server: EmbeddedServer) -> None:
    many, holding = chain_of(3000), chain_of(3000)
    async with an_index(server, max_blocks=1000) as index, a_writer(server, holding=holding) as writer:
        await until(lambda: index.mirror.num_blocks == 1000)
        await asyncio.sleep(0.2)
        assert not index.mirror.is_exact
        assert index.mirror.num_blocks <= 1000
        answer = await index.longest(many)
        assert (answer.confidence, [one.num_blocks for one in answer.holdings]) == (Confidence.EXACT, [3000])
        del holding[500:]
        writer.retract(many[500:])

        await exactly(index, {"a": 500}, many)  # it fits again


async def test_a_fleet_of_changes_is_answered_without_a_round_trip(server: EmbeddedServer) -> None:
    many = chain_of(2048)
    async with an_index(server) as index, a_writer(server, holding=many):
        await exactly(index, {"a": 2048}, many)
        redis = Redis.from_url(server.url)
        before = redis.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        took_s = []
        for _ in range(20):
            began_s = time.perf_counter()
            assert [one.num_blocks for one in (await index.longest(many)).holdings] == [2048]
            took_s.append(time.perf_counter() - began_s)
        after = redis.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)

    assert min(took_s) < 0.02
    assert after - before < 20  # other scripts run meanwhile, signs of life
