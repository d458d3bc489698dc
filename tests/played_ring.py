"""A control of a prefill ring with ranks that do what they are told, for the tests of what it plans."""

from __future__ import annotations

import numpy as np

from kvrelay.core import prefix_hash
from kvrelay.core.shard import Span
from kvrelay.core.types import Sampling
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.jobs import Event, Job, Phase
from kvrelay.prefill_node.pages import RingPages
from kvrelay.proto.v1 import common_pb2, ring_pb2

PAGE, BLOCK, CHUNK = 16, 32, 64


def a_job(name: str, tokens: int, *, prefix: int = 0, attempt: int = 1) -> Job:
    """Return a job whose prompt begins with the tokens of family `prefix` (same family: same beginning)."""
    prompt = np.arange(tokens, dtype=np.int32) + 1000 * prefix
    hashes = tuple(prefix_hash.chain(prefix_hash.seed(fingerprint=b"f"), prompt, block_tokens=BLOCK))
    ref = common_pb2.RequestRef(request_id=name, attempt=attempt)
    return Job(ref, prompt, Sampling(max_tokens=8), block_hashes=hashes)


class Ring:
    """A control with ranks that do what they are told and report it."""

    def __init__(self, *, ring_size: int = 1, pages: int = 64, max_jobs: int = 8, prefix_wait_s: float = 10.0) -> None:
        self.pages = RingPages(
            pages_per_rank=[pages] * ring_size,
            page_tokens=PAGE,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            align_tokens=1,
        )
        self.control = RingControl(
            self.pages, block_tokens=BLOCK, chunk_tokens=CHUNK, max_jobs=max_jobs, prefix_wait_s=prefix_wait_s
        )
        self.ring_size = ring_size
        self.closed: list[set[str]] = [set() for _ in range(ring_size)]
        self.chunks: list[tuple[str, Span]] = []
        self.now_s = 0.0

    def step(self, *, stopped: bool = False, drain: bool = True, failed: dict[str, str] | None = None) -> list[Event]:
        self.now_s += 1.0
        step = self.control.plan(self.now_s)
        if step.HasField("chunk") and not stopped:
            self.chunks.append((step.chunk.request_id, Span(step.chunk.tokens.start, step.chunk.tokens.end)))
        reports = []
        for rank in range(self.ring_size):
            self.closed[rank] |= set(step.closes)
            report = ring_pb2.RankReport(step_id=step.step_id, rank=rank, stopped=stopped, failed=failed or {})
            if drain:
                report.drained.extend(sorted(self.closed[rank]))
                self.closed[rank].clear()
            reports.append(report)
        return self.control.applied(reports)

    def run(self, steps: int = 200) -> list[Event]:
        """Step until nothing is left to do, closing jobs when they are computed, and return all events."""
        events: list[Event] = []
        for _ in range(steps):
            for key in {key for key, _ in self.chunks}:
                if self.control.phase_of(key) is Phase.SEALING:
                    self.control.close(key, abort=True)
            events += self.step()
            if not self.control.active_jobs and not self.control.closing_jobs:
                break
        return events
