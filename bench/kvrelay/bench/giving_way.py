"""`kvrelay bench giving-way`: what a short prompt waits for that comes while a long one is computed, on one device.

The step thread of a prefill node computes both, with chunks that give way between layers and with chunks that do not,
in turns. Nothing is handed over. The short prompt comes when given parts of the long one's time alone have passed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrelay.bench import device_rates, report
from kvrelay.bench.random_model import SHAPES, random_model
from kvrelay.core.errors import TransferError
from kvrelay.core.settings import load
from kvrelay.core.types import Counters, Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.loaded import choose_device
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.job_events import Failed, FirstToken, JobEvent
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.pages import RingPages
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.rank_request import Writer
from kvrelay.prefill_node.ring import Ring
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.prefill_node.wiring import align_tokens
from kvrelay.proto.v1 import common_pb2, handoff_pb2

BLOCK_TOKENS = 64
_LONGEST_S = 300.0


@dataclass(slots=True)
class Asked:
    """A prompt on its way, and its first token once it is there."""

    began_s: float
    over: threading.Event
    ttft_s: float = 0.0
    token: int = -1

    def hear(self, event: JobEvent) -> None:
        if isinstance(event, FirstToken):
            self.ttft_s, self.token = time.perf_counter() - self.began_s, event.token.token_id
        if isinstance(event, FirstToken | Failed):
            self.over.set()

    def wait(self) -> Asked:
        """Wait for the first token.

        Raises:
            TransferError: it does not come.
        """
        if not self.over.wait(_LONGEST_S) or self.token < 0:
            raise TransferError("the step thread does not answer")
        return self


class Bench:
    """One model and one pool, and a step thread for each way over them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._config = SHAPES[options.shape]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._model = random_model(self._config, device, dtype)
        layout = self._model.layout(block_tokens=BLOCK_TOKENS)
        self._num_pages = layout.pages_for(options.prompt) + 4 * layout.pages_for(options.short)
        self._pool = LatentPool(layout, self._num_pages, device)
        self._settings = load(PrefillSettings, ["--model", "-"], prog="kvrelay bench giving-way")
        self._num_asked = 0

    def leader(self, *, chunk_tokens: int, give_way_s: float) -> tuple[Leader, Counters]:
        """Return a leader that runs, and what it counts."""
        pool, counters = self._pool, Counters()
        planner = ChunkPlanner(
            rank=0, ring_size=1, align_tokens=align_tokens(pool.device),
            ring_block_tokens=self._settings.ring_block_tokens_on(pool.device.type), device=pool.device,
        )  # fmt: skip
        pages = RingPages(
            pages_per_rank=[self._num_pages], page_tokens=pool.layout.page_tokens, block_tokens=BLOCK_TOKENS,
            chunk_tokens=chunk_tokens, align_tokens=align_tokens(pool.device),
        )  # fmt: skip
        control = RingControl(
            pages, block_tokens=BLOCK_TOKENS, chunk_tokens=chunk_tokens, max_jobs=4, prefix_wait_s=1.0
        )
        worker = RankWorker(
            self._model, pool, Ring(None, pool, counters), open_writer=_no_writer, planner=planner, counters=counters
        )
        leader = Leader(
            control, worker, None, token_bytes=1, on_cache=lambda _: None, counters=counters, give_way_s=give_way_s
        )
        threading.Thread(target=leader.run, name="step", daemon=True).start()
        return leader, counters

    def ask(self, leader: Leader, tokens: int) -> Asked:
        """Send a prompt that is the same each time its length is."""
        self._num_asked += 1
        prompt_T = np.random.default_rng(tokens).integers(self._config.vocab_size, size=tokens).astype(np.int32)
        ref = common_pb2.RequestRef(request_id=f"r{self._num_asked}", attempt=1)
        asked = Asked(time.perf_counter(), threading.Event())
        leader.submit(Job(request=ref, prompt_T=prompt_T, sampling=Sampling(max_tokens=2)), asked.hear)
        return asked


def _no_writer(_: handoff_pb2.Ticket) -> Writer:
    raise AssertionError("nothing is handed over")


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    device = choose_device(options.device)
    result = measure(options, device)
    report.tell(result, out=options.out, device=device_rates.short_name(device), bench="giving_way")
    return 0


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    bench = Bench(options, device)
    return {
        "shape": options.shape, "device": str(device), "prompt_tokens": options.prompt, "short_tokens": options.short,
        "chunks": [_of_chunk(bench, options, tokens) for tokens in options.chunk_tokens],
    }  # fmt: skip


def _of_chunk(bench: Bench, options: argparse.Namespace, chunk_tokens: int) -> dict[str, Any]:
    """Return the figures of one length of chunks; the long one alone is asked twice, the first time to warm up."""
    ways = {
        name: bench.leader(chunk_tokens=chunk_tokens, give_way_s=give_way_s)
        for name, give_way_s in (("goes_on", 0.0), ("gives_way", options.give_way_ms / 1e3))
    }
    for leader, _ in ways.values():  # until it knows what chunks cost
        while leader.chunk_times.fitted is None:
            bench.ask(leader, options.short).wait()
    first, _ = ways["goes_on"]
    short, long = (
        [bench.ask(first, tokens).wait() for _ in range(2)][-1] for tokens in (options.short, options.prompt)
    )
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    same_tokens = True
    for number in range(options.rounds * len(options.at)):
        at = options.at[number % len(options.at)]
        for way in list(ways)[:: 1 if number % 2 else -1]:
            leader, _ = ways[way]
            beside = bench.ask(leader, options.prompt)
            time.sleep(at * long.ttft_s)
            came = bench.ask(leader, options.short).wait()
            beside.wait()
            same_tokens &= (came.token, beside.token) == (short.token, long.token)
            seen[way].append({"at": at, "short_s": came.ttft_s, "long_s": beside.ttft_s})
    pauses = {way: counters.values.get("chunk_pauses_total", 0.0) for way, (_, counters) in ways.items()}
    for leader, _ in ways.values():
        leader.shut_down()
    over = [yes["short_s"] / no["short_s"] for yes, no in zip(seen["gives_way"], seen["goes_on"], strict=True)]
    return {
        "chunk_tokens": chunk_tokens, "same_tokens": same_tokens,
        "short_alone_ms": round(short.ttft_s * 1e3, 3), "long_alone_ms": round(long.ttft_s * 1e3, 3),
        "gives_way_over_goes_on": round(statistics.median(over), 4),
        "ways": {way: _figures(found, short, long) | {"pauses": pauses[way]} for way, found in seen.items()},
    }  # fmt: skip


def _figures(found: list[dict[str, float]], short: Asked, long: Asked) -> dict[str, Any]:
    times = [one["short_s"] for one in found]
    by_part: dict[float, list[float]] = {}
    for one in found:
        by_part.setdefault(one["at"], []).append(one["short_s"])
    return {
        "short_ms": {f"{at:g}": round(statistics.median(all_s) * 1e3, 1) for at, all_s in by_part.items()},
        "short_median_ms": round(statistics.median(times) * 1e3, 3), "short_worst_ms": round(max(times) * 1e3, 3),
        "short_over_alone": round(statistics.median(times) / short.ttft_s, 4),
        "long_over_alone": round(statistics.median(one["long_s"] for one in found) / long.ttft_s, 4),
    }  # fmt: skip
