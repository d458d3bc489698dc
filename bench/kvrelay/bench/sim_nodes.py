"""Simulated nodes: they take the time that their cost model says and keep the blocks that fit. No clock, no threads.

A prefill node runs the real chunk scheduler over one device. A decode node steps all its sequences together; between
two changes of its batch the step time is constant, so it is advanced over many steps at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.core.shard import Span
from kvrelay.core.types import Incarnation
from kvrelay.prefill_node.scheduler import ChunkScheduler, NextChunk
from kvrelay.router.cost import NodeCost, compute_s


class BlockCache:
    """The blocks of one node: at most so many, least recently used first out, and a block before those it follows."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[bytes]) -> int:
        """Return how many leading blocks are here."""
        return next((depth for depth, one in enumerate(blocks) if one not in self._blocks), len(blocks))

    def use(self, blocks: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Hold these blocks, as the latest used ones; return (those that are new, those that had to go)."""
        added = [one for one in blocks if one not in self._blocks]
        for one in reversed(blocks):  # deepest first, so that it is also the first to go
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._max_blocks)]
        return added, evicted


@dataclass(slots=True)
class Job:
    """One request on its way through a simulated fleet. Filled by whoever has to do with it."""

    key: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[bytes]
    block_tokens: int
    slo: str = "standard"
    cached_tokens: int = 0
    alone_s: float = 0.0  # what its chunks took on the device
    first_token_s: float | None = None
    finished_s: float | None = None
    tokens_left: float = 0.0
    where: Incarnation | None = None  # its decode node
    slow_gaps: float = 0.0  # gaps between tokens that were longer than the target
    tbt_target_s: float = float("inf")


@dataclass(slots=True)
class SimPrefill:
    """One prefill node: a cache, the real scheduler, and a device that runs one chunk at a time."""

    node: Incarnation
    cost: NodeCost
    cache: BlockCache
    chunk_tokens: int
    ring_size: int = 1
    jobs: dict[str, Job] = field(default_factory=dict)
    busy_until_s: float | None = None
    work_s: float = 0.0  # done
    computed_tokens: int = 0
    hit_blocks: int = 0
    owners: dict[bytes, str] = field(default_factory=dict)  # block -> the request that computes it here
    waiting: dict[str, list[Job]] = field(default_factory=dict)  # owner -> who waits for its blocks
    has_changed: bool = True  # since its latest heartbeat
    scheduler: ChunkScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = ChunkScheduler(chunk_tokens=self.chunk_tokens)

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute, as far as known: those who wait for a prefix will need little more than a block."""
        return self.scheduler.tokens_left()

    def add(self, job: Job) -> None:
        """Take a request; it waits first for a prefix that another request is computing here."""
        self.jobs[job.key] = job
        self.has_changed = True
        owner = self._owner_ahead(job)
        if owner is not None:
            self.waiting.setdefault(owner, []).append(job)
            return
        matched = self.cache.match(job.blocks)
        self.cache.use(job.blocks[:matched])
        self.hit_blocks += matched
        job.cached_tokens = min(matched * job.block_tokens, job.prompt_tokens - 1)
        for block in job.blocks[matched:]:
            self.owners.setdefault(block, job.key)
        self.scheduler.add(job.key, Span(job.cached_tokens, job.prompt_tokens))

    def _owner_ahead(self, job: Job) -> str | None:
        """Return who computes the first block that is missing here, if anybody does."""
        matched = self.cache.match(job.blocks)
        return self.owners.get(job.blocks[matched]) if matched < len(job.blocks) else None

    def begin(self, now_s: float) -> tuple[NextChunk, float] | None:
        """Return the chunk to run now and when it ends; None when there is none."""
        chunk = self.scheduler.next_chunk()
        if chunk is None:
            return None
        took_s = self.chunk_s(chunk)
        self.busy_until_s = now_s + took_s
        self.work_s += took_s
        self.jobs[chunk.request_id].alone_s += took_s
        self.computed_tokens += chunk.tokens.num_tokens
        return chunk, self.busy_until_s

    def chunk_s(self, chunk: NextChunk) -> float:
        return compute_s(
            self.cost,
            tokens=chunk.tokens.num_tokens,
            cached=chunk.tokens.start,
            ring_size=self.ring_size,
            break_even_tokens=1,
        )

    def ended(self, chunk: NextChunk) -> tuple[Job, list[bytes], list[bytes]] | None:
        """Take the end of a chunk; with a prompt's last one return its request, the new blocks and the evicted ones."""
        self.busy_until_s = None
        self.has_changed = True
        self.scheduler.ran(chunk)
        if not chunk.is_last:
            return None
        job = self.jobs.pop(chunk.request_id)
        added, evicted = self.cache.use(job.blocks)
        for block in job.blocks:
            if self.owners.get(block) == job.key:
                del self.owners[block]
        for waiting in self.waiting.pop(job.key, ()):
            self.add(waiting)
        return job, added, evicted


@dataclass(slots=True)
class SimDecode:
    """One decode node: a batch that steps together, and pages for so many tokens."""

    node: Incarnation
    cost: NodeCost
    max_tokens: int
    running: dict[str, Job] = field(default_factory=dict)
    advanced_s: float = 0.0
    context_tokens: float = 0.0
    version: int = 0  # counts the changes of the batch
    paused: bool = False  # the device is doing something else
    has_changed: bool = True  # since its latest heartbeat

    def step_s(self) -> float:
        n = len(self.running)
        return self.cost.step_s + n * self.cost.sequence_s + self.context_tokens * self.cost.context_token_s

    def advance(self, now_s: float) -> list[Job]:
        """Let time pass up to now; return the requests that have ended."""
        passed_s, self.advanced_s = now_s - self.advanced_s, now_s
        if not self.running or passed_s <= 0:
            return []
        if self.paused:
            for job in self.running.values():
                job.slow_gaps += passed_s > job.tbt_target_s
            return []
        step_s = self.step_s()
        steps = passed_s / step_s
        self.context_tokens += steps * len(self.running)
        for job in self.running.values():
            job.tokens_left -= steps
            if step_s > job.tbt_target_s:
                job.slow_gaps += steps
        return self._ended(now_s)

    def _ended(self, now_s: float) -> list[Job]:
        ended = [job for job in self.running.values() if job.tokens_left <= 1e-3]
        self.has_changed |= bool(ended)
        for job in ended:
            job.finished_s = now_s
            del self.running[job.key]
            self.context_tokens = max(0.0, self.context_tokens - job.prompt_tokens - job.output_tokens)
        return ended

    def ride_along(self, now_s: float, gap_s: float) -> list[Job]:
        """Give every running sequence one token, which took `gap_s`; return the requests that have ended."""
        self.advanced_s = now_s
        for job in self.running.values():
            job.tokens_left -= 1
            job.slow_gaps += gap_s > job.tbt_target_s
        self.context_tokens += len(self.running)
        return self._ended(now_s)

    def join(self, job: Job) -> None:
        job.tokens_left = job.output_tokens - 1
        self.running[job.key] = job
        self.has_changed = True
        self.context_tokens += job.prompt_tokens

    def next_end_s(self) -> float | None:
        """Return when the next request will end if nothing changes."""
        if not self.running or self.paused:
            return None
        return self.advanced_s + max(0.0, min(job.tokens_left for job in self.running.values())) * self.step_s() + 1e-7
