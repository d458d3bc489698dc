"""`kvrelay bench chunks`: what a prefill node does to a chunk beside computing it, one thing more at a time.

*bare*: the prefill step in a loop. *worker*: what the step thread of a node runs, with rank 0's decisions. *sums*: the
same with the checksum of every part. *relay*: parts are also written, by the transfer thread, into another process's
pool. All four on one device, in turns, each a new prompt until its first token; afterwards the other process must hold
the same rows.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.bench import device_rates, report
from kvrelay.bench.random_model import SHAPES, random_model
from kvrelay.bench.reader_process import NUM_CELLS, ReaderProcess, layer_sums
from kvrelay.core.clock import monotonic
from kvrelay.core.errors import TransferError
from kvrelay.core.settings import load
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, Incarnation, SampledToken, Sampling
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.local import LocalPool
from kvrelay.kv_transfer.outgoing import Posting
from kvrelay.kv_transfer.plan import Pages, Routes
from kvrelay.kv_transfer.pool_agent import local_pool, start_agent
from kvrelay.kv_transfer.writer_table import Drained
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.loaded import choose_device
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.model.single import SingleEngine
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.group import Leave
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.pages import RingPages
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.ring import Ring
from kvrelay.prefill_node.settings import PrefillSettings
from kvrelay.prefill_node.wiring import align_tokens
from kvrelay.proto.v1 import common_pb2, handoff_pb2

WAYS = ("bare", "worker", "sums", "relay")
BLOCK_TOKENS = 64
_GREEDY = Sampling(max_tokens=2)
Prompt = npt.NDArray[np.int32]


class PartsOut:
    """Stands where the hand-off of a request does: sums every part and, if asked, writes it to the reader's pages."""

    failure: str | None = None
    settled = False
    sources_free = True  # nothing is freed before `wait`

    def __init__(self, pool: LocalPool, transfer: TransferThread | None, *, key: str, reader: ReaderProcess) -> None:
        self._pool, self._transfer, self._key = pool, transfer, key
        there = range(reader.num_pages)  # a prompt's pages in their order
        self._routes = Routes(
            pool.layout, src_pool_pages=pool.num_pages, dst_pages=there, dst_pool_pages=reader.num_pages
        )
        self._sums: list[Future[None]] = []
        self._drained = threading.Event()
        self.num_bytes = 0
        if transfer is not None:
            transfer.open_writer(key, reader.address, fence_cell=0, fence_value=1, on_events=self._on_events)

    def add_part(self, layer: int, tokens: Span, src_pages: Pages) -> None:
        pool, sums = self._pool, self._pool.device_sums
        route = self._routes.of(tokens, src_pages)
        ranges, copies = route.ranges(layer), route.copies(layer)
        self.num_bytes += sum(num_bytes for _, num_bytes in ranges)

        def summed(_: int) -> None:
            if self._transfer is not None:
                self._transfer.post_part(self._key, Posting(copies, b"part"))

        if sums is None:
            summed(pool.checksum(ranges))
        else:
            wait = sums.start(ranges)
            self._sums.append(sums.waiter.submit(lambda: summed(wait())))

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def wait(self) -> None:
        """Wait until everything has left."""
        for one in self._sums:
            one.result()
        if self._transfer is not None:
            self._transfer.finish(self._key)
            assert self._drained.wait(60), "the writes do not end"
            self._transfer.close_writer(self._key)

    def _on_events(self, events: tuple[object, ...]) -> None:
        for event in events:
            assert isinstance(event, Drained), event
            self._drained.set()


class Bench:
    """One model, one pool, a process that is written to, and all ways over them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._config = SHAPES[options.shape]
        self._chunk_tokens: int = options.chunk_tokens
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._model = random_model(self._config, device, dtype)
        layout = self._model.layout(block_tokens=BLOCK_TOKENS)
        self._num_pages = layout.pages_for(max(options.prompt))
        self._reader = ReaderProcess(layout, self._num_pages, device)
        self._pool = LatentPool(layout, self._num_pages, device)
        settings = load(PrefillSettings, ["--model", "-"], prog="kvrelay bench chunks")
        self._transfer = start_agent(
            self._pool, settings, node=Incarnation.new("bench"), rank=0, num_cells=NUM_CELLS, on_fatal=lambda: None
        ).transfer
        self._local = local_pool(self._pool)
        self._planner = ChunkPlanner(
            rank=0, ring_size=1, align_tokens=align_tokens(device),
            ring_block_tokens=settings.ring_block_tokens_on(device.type), device=device,
        )  # fmt: skip
        self._num_runs = 0

    def close(self) -> None:
        self._transfer.stop()
        self._reader.close()

    def check_relayed(self, tokens: int) -> None:
        """Raise TransferError unless the reader holds the rows of the last prompt, which were just written to it."""
        ours, theirs = layer_sums(self._pool, tokens), self._reader.layer_sums(tokens)
        if not np.allclose(ours, theirs, rtol=1e-9, atol=1e-9):
            raise TransferError(f"the reader holds other rows of {tokens} tokens: sums by layer {ours} and {theirs}")

    def prompt(self, tokens: int, run: int) -> Prompt:
        made = np.random.default_rng((tokens, run)).integers(self._config.vocab_size, size=tokens)
        return made.astype(np.int32)

    def first_token(self, way: str, prompt: Prompt) -> dict[str, float]:
        """Return one prompt's time to the first token, and the launching thread's CPU time until it waits for it."""
        return self._bare(prompt) if way == "bare" else self._node(way, prompt)

    @torch.inference_mode()
    def _bare(self, prompt: Prompt) -> dict[str, float]:
        engine = SingleEngine(self._model, self._pool)
        session = engine.open(len(prompt))
        began = _Began()
        for hidden_TD in engine.chunks(session, prompt.astype(np.int64), self._chunk_tokens):
            last_1D = hidden_TD[-1:]
        return self._sampled(self._model.logits(last_1D), prompt, began)

    def _node(self, way: str, prompt: Prompt) -> dict[str, float]:
        self._num_runs += 1
        out: list[PartsOut] = []

        def open_writer(_: handoff_pb2.Ticket) -> PartsOut:
            transfer = self._transfer if way == "relay" else None
            out.append(PartsOut(self._local, transfer, key=f"run {self._num_runs}", reader=self._reader))
            return out[0]

        counters = Counters()
        worker = RankWorker(
            self._model, self._pool, Ring(None, self._pool, counters), open_writer=open_writer, planner=self._planner,
            counters=counters,
        )  # fmt: skip
        control = self._control()
        ticket = None if way == "worker" else handoff_pb2.Ticket(prompt_tokens=len(prompt))
        ref = common_pb2.RequestRef(request_id=f"r{self._num_runs}", attempt=1)
        job = Job(request=ref, prompt_T=prompt, sampling=_GREEDY, ticket=ticket)
        began, logits_V = _Began(), None
        control.submit(job, monotonic())
        while logits_V is None:
            result = worker.run(control.plan(monotonic()), lambda *_: Leave.NO)
            control.applied([result.report])
            logits_V = result.logits_V
        found = self._sampled(logits_V[None], prompt, began)
        for one in out:
            one.wait()
        control.close(job.key, abort=True)
        while control.phase_of(job.key) is not None:
            control.applied([worker.run(control.plan(monotonic()), lambda *_: Leave.NO).report])
        return found

    def _control(self) -> RingControl:
        pages = RingPages(
            pages_per_rank=[self._num_pages], page_tokens=self._pool.layout.page_tokens, block_tokens=BLOCK_TOKENS,
            chunk_tokens=self._chunk_tokens, align_tokens=align_tokens(self._pool.device),
        )  # fmt: skip
        return RingControl(
            pages, block_tokens=BLOCK_TOKENS, chunk_tokens=self._chunk_tokens, max_jobs=1, prefix_wait_s=1.0
        )

    def _sampled(self, logits_1V: torch.Tensor, prompt: Prompt, began: _Began) -> dict[str, float]:
        host_s = began.thread_s()
        (token,) = sample(logits_1V, [SamplerState(_GREEDY, prompt)], [len(prompt)])
        assert isinstance(token, SampledToken), token
        return {"ttft_s": began.wall_s(), "host_s": host_s, "token": token.token_id}


class _Began:
    def __init__(self) -> None:
        self._wall_s, self._thread_s = time.perf_counter(), time.thread_time()

    def wall_s(self) -> float:
        return time.perf_counter() - self._wall_s

    def thread_s(self) -> float:
        return time.thread_time() - self._thread_s


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    device = choose_device(options.device)
    result = measure(options, device)
    report.tell(result, out=options.out, device=device_rates.short_name(device), bench="chunks")
    return 0


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    bench = Bench(options, device)
    try:
        return {
            "shape": options.shape, "device": str(device), "chunk_tokens": options.chunk_tokens,
            "prompts": [_length(bench, tokens, options.rounds) for tokens in options.prompt],
        }  # fmt: skip
    finally:
        bench.close()


def _length(bench: Bench, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one length; the first round warms up."""
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(-1, rounds):
        prompt = bench.prompt(tokens, number + 1)
        for way in WAYS[:: 1 if number % 2 else -1]:
            found = bench.first_token(way, prompt)
            if way == "relay":
                bench.check_relayed(tokens)
            if number >= 0:
                seen[way].append(found)
    bare = seen["bare"]
    return {
        "prompt_tokens": tokens,
        "same_tokens": all(
            one["token"] == same["token"] for found in seen.values() for one, same in zip(found, bare, strict=True)
        ),
        "ways": {way: _figures(found, bare) for way, found in seen.items()},
    }


def _figures(found: list[dict[str, float]], bare: list[dict[str, float]]) -> dict[str, float]:
    ratios = [one["ttft_s"] / same["ttft_s"] for one, same in zip(found, bare, strict=True)]
    return {
        "ttft_ms": round(statistics.median(one["ttft_s"] for one in found) * 1e3, 3),
        "host_ms": round(statistics.median(one["host_s"] for one in found) * 1e3, 3),
        "over_bare": round(statistics.median(ratios), 4),
    }
