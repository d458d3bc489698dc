"""`kvrelay bench echo`: what placing a prompt costs over a bare gRPC echo of the same bytes on the same machine.

For each prompt length the highest rate is found at which the echo keeps its 99th percentile under 5 ms. At that rate
and at a tenth of it, echo and router are called in turn, each from an open loop. The router's answer is a preview: it
hashes the prompt, asks its index, scores every node and explains, but enters nothing. Half of each prompt is cached on
two of the nodes. Tokenizing has no part in it: prompts are ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from grpc import aio

from kvrelay.bench import open_loop, report
from kvrelay.bench.echo_child import METHOD
from kvrelay.bench.placement import quantile
from kvrelay.bench.played_fleet import BLOCK_TOKENS, endpoint_of, playing
from kvrelay.bench.played_index import held_chain
from kvrelay.core import prefix_hash
from kvrelay.index.reader import PAUSE_S, Confidence, PrefixReader
from kvrelay.proto import convert
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import fleet_pb2

PREVIEW = "/kvrelay.v1.Fleet/Preview"
ECHO_P99_S = 0.005
INDEX_BLOCKS = 2048
_INDEX_ROUNDS = 100
_RATES = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1200.0, 1600.0, 2400.0, 3200.0)
_PROBE_S = 1.5
_SETTLE_S = 1.0
Call = Callable[[bytes], Awaitable[bytes]]


def run(options: argparse.Namespace) -> int:
    """Measure, print a table and a JSON object, write the result file when asked to."""
    result = uvloop.run(_run(options))
    if options.out:
        print(report.write(Path(options.out), device="cpu", bench="echo", result=result))
    print(json.dumps(result))
    return 0


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(options.seed)
    prompts = [rng.integers(0, 32_000, length, dtype=np.int32) for length in options.prompt_tokens]
    result: dict[str, Any] = {"prefill_nodes": options.prefill, "decode_nodes": options.decode, "prompts": {}}
    async with playing(prompts, prefill_nodes=options.prefill, decode_nodes=options.decode) as fleet:
        await asyncio.sleep(_SETTLE_S)
        router = connect(fleet.router, max_message_bytes=64 << 20)
        place = _method(router, PREVIEW)
        for ids in prompts:
            request = fleet_pb2.PreviewRequest(packed_ids=convert.pack_ids(ids), max_tokens=256).SerializeToString()
            answer = await place(request)
            said = fleet_pb2.ExplainReply.FromString(answer)
            assert max(one.cached_tokens for one in said.candidates) >= len(ids) // 2 - BLOCK_TOKENS, "half is cached"
            row = await _beside_an_echo(place, request, reply_bytes=len(answer), options=options)
            row["index_confidence"] = said.index_confidence
            result["prompts"][str(len(ids))] = row
            _print_rows(len(ids), row)
        await router.close()
        result["index"] = await _index_round_trip(fleet.index.url)
        print(f"index: {result['index']}")
    return result


async def _beside_an_echo(
    place: Call, request: bytes, *, reply_bytes: int, options: argparse.Namespace
) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvrelay.bench.echo_child", str(os.getpid()), str(reply_bytes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220, S603 - our own
    channel = connect(await asyncio.to_thread(endpoint_of, child), max_message_bytes=64 << 20)
    echo = _method(channel, METHOD)
    try:
        rate = await _highest_rate(echo, request, seed=options.seed)
        return {
            "request_bytes": len(request),
            "at_echo_limit": await _in_turn(echo, place, request, rate=rate, options=options),
            "at_a_tenth": await _in_turn(echo, place, request, rate=rate / 10, options=options),
        }
    finally:
        await channel.close()
        child.terminate()
        await asyncio.to_thread(child.wait)


def _method(channel: aio.Channel, name: str) -> Call:
    """Return a method that takes and gives bytes, so that both calls cost this process the same."""
    method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(name)

    async def call(request: bytes) -> bytes:
        return await method(request)

    return call


async def _highest_rate(call: Call, request: bytes, *, seed: int) -> float:
    """Return the highest of some rates at which the call keeps its 99th percentile."""
    best = _RATES[0]
    for rate in _RATES:
        taken_s = await _taken_s(call, request, rate=rate, duration_s=_PROBE_S, seed=seed)
        if quantile(taken_s, 0.99) >= ECHO_P99_S:
            break
        best = rate
    return best


async def _in_turn(
    echo: Call, place: Call, request: bytes, *, rate: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return both times in ms and the medians of the paired ratios."""
    ratios: dict[float, list[float]] = {0.5: [], 0.99: []}
    taken_ms: dict[str, list[float]] = {"echo": [], "place": []}
    for at in range(options.rounds):
        pair = {}
        for name, call in (("echo", echo), ("place", place)):
            pair[name] = await _taken_s(call, request, rate=rate, duration_s=options.seconds, seed=options.seed + at)
            taken_ms[name] += [one * 1e3 for one in pair[name]]
        for share, found in ratios.items():
            found.append(quantile(pair["place"], share) / quantile(pair["echo"], share))
    return {
        "rate_per_s": rate,
        **{
            f"{name}_{label}_ms": round(quantile(values, share), 3)
            for name, values in taken_ms.items()
            for label, share in (("p50", 0.5), ("p99", 0.99))
        },
        "ratio_p50": round(statistics.median(ratios[0.5]), 3),
        "ratio_p99": round(statistics.median(ratios[0.99]), 3),
    }


async def _taken_s(call: Call, request: bytes, *, rate: float, duration_s: float, seed: int) -> list[float]:
    async def one(_: int, due_s: float) -> float:
        await call(request)
        return time.perf_counter() - due_s

    return await open_loop.run(open_loop.poisson(rate, duration_s, seed=seed), one)


async def _index_round_trip(url: str) -> dict[str, float]:
    """Return the time of the longest match of 2,048 blocks on the server, over that of one MGET of as many keys."""
    match_s: list[float] = []
    mget_s: list[float] = []
    async with held_chain(url, INDEX_BLOCKS) as (fleet, hashes, redis):
        reader = PrefixReader(url, fleet)
        while len(match_s) < _INDEX_ROUNDS:
            began_s = time.perf_counter()
            found = await reader.longest(hashes)
            took_s = time.perf_counter() - began_s
            if found.confidence is Confidence.FALLBACK:  # the machine is so busy that the reader gave up
                await asyncio.sleep(PAUSE_S)
                continue
            match_s.append(took_s)
            assert [one.num_blocks for one in found.holdings] == [INDEX_BLOCKS]
            began_s = time.perf_counter()
            await redis.mget(hashes)
            mget_s.append(time.perf_counter() - began_s)
        await reader.close()
    chain_s = time.perf_counter()
    prefix_hash.chain(b"", np.zeros(INDEX_BLOCKS * BLOCK_TOKENS, dtype=np.int32), block_tokens=BLOCK_TOKENS)
    chain_s = time.perf_counter() - chain_s
    return {
        "blocks": INDEX_BLOCKS,
        "round_trip_ms": round(statistics.median(match_s) * 1e3, 3),
        "mget_ms": round(statistics.median(mget_s) * 1e3, 3),
        "ratio": round(statistics.median(a / b for a, b in zip(match_s, mget_s, strict=True)), 3),
        "hashing_ms": round(chain_s * 1e3, 3),
    }


def _print_rows(prompt_tokens: int, row: dict[str, Any]) -> None:
    for name in ("at_echo_limit", "at_a_tenth"):
        at = row[name]
        print(
            f"{prompt_tokens:>9} tokens, {at['rate_per_s']:>6g}/s: "
            f"echo p50 {at['echo_p50_ms']} p99 {at['echo_p99_ms']} ms, "
            f"placed p50 {at['place_p50_ms']} p99 {at['place_p99_ms']} ms, "
            f"ratios {at['ratio_p50']} and {at['ratio_p99']}",
            flush=True,
        )
