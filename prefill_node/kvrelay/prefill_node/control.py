"""Rank 0's decisions: who is let in, which chunk runs next, whose pages come back. Events in, ring steps out.

A job is QUEUED until it has all its pages, RUNNING while chunks are left, SEALING while its hand-off ends, CLOSING
until every rank has said that none of its writes can still read the pages. Pages are held from RUNNING to the end of
CLOSING; blocks that every layer of every rank has computed stay behind in the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.core.errors import CapacityError, StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.kvcache.allocator import PageAccount
from kvrelay.prefill_node.fills import FillOrder, Fills
from kvrelay.prefill_node.jobs import CacheChanged, Computed, Event, Gone, HandoffFailed, Job, Opened, Phase
from kvrelay.prefill_node.owned_runs import owned_runs
from kvrelay.prefill_node.pages import RequestPages, RingPages
from kvrelay.prefill_node.pushes import Pushes
from kvrelay.prefill_node.scheduler import ChunkScheduler, NextChunk
from kvrelay.proto.convert import incarnation_from_pb, pack_ids, span_to_pb
from kvrelay.proto.v1 import ring_pb2

_MAX_OVERTAKEN = 16  # times a job that lacks room may be passed by smaller ones
_MAX_SHORT = 8  # jobs that lack room before the rest of the queue waits; bounds the work of one plan


@dataclass(slots=True)
class _Record:
    job: Job
    submitted_s: float
    phase: Phase = Phase.QUEUED
    pages: RequestPages | None = None
    short_since: int | None = None  # state of the room, as counted by RingControl, in which it found none
    sent_pages: int = 0  # prompt pages that the ranks know
    committed_blocks: int = 0
    overtaken: int = 0
    waits_for: bytes | None = None  # block that another job is computing
    waiting_since_s: float = 0.0
    aborted: bool = False
    close_sent: bool = False
    undrained: set[int] = field(default_factory=set)


class RingControl:
    """Owned by the step thread of rank 0; never waits, reads no clock, touches no device."""

    def __init__(
        self, pages: RingPages, *, block_tokens: int, chunk_tokens: int, max_jobs: int, prefix_wait_s: float
    ) -> None:
        self._pages = pages
        self._block_tokens = block_tokens
        self._max_jobs = max_jobs
        self._prefix_wait_s = prefix_wait_s
        self._scheduler = ChunkScheduler(chunk_tokens=chunk_tokens)
        self._records: dict[str, _Record] = {}  # in order of arrival
        self._computing: dict[bytes, str] = {}  # block -> the job that computes it, or the fill that brings it
        self.fills = Fills(pages, block_tokens=block_tokens, computing=self._computing)
        self.pushes = Pushes(pages, most=max_jobs)
        self._step_id = 0
        self._room = 0  # grows whenever a job that found no room might find some
        self._room_planned = 0  # its value at the last plan
        self._chunk: NextChunk | None = None  # of the step in work
        self._events: list[Event] = []
        self._fences: list[ring_pb2.RingFence] = []

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a job.

        Raises:
            InvalidRequestError: even an empty node could not hold it.
            CapacityError: too many jobs wait already.
            StaleMessageError: this attempt is here already.
        """
        if job.key in self._records:
            raise StaleMessageError(f"request {job.request.request_id} attempt {job.request.attempt} is here already")
        self._pages.refuse_impossible(job.prompt_tokens)
        if self._is_full:
            raise CapacityError(f"{self._num_requests} requests wait or run here, the limit is {self._max_jobs}")
        self._records[job.key] = _Record(job, now_s)

    def close(self, key: str, *, abort: bool) -> bool:
        """End a job, in whatever phase, or a push; its pages come back when every rank has drained.

        Args:
            abort: every rank gives up its hand-off; False when the reader has admitted the request.

        Returns:
            False when it was not active.
        """
        record = self._records.get(key)
        if record is None:
            return self.pushes.close(key, abort=abort)
        if record.phase is Phase.CLOSING:
            return False
        self._scheduler.remove(key)
        self._release_claims(key)
        if record.pages is None:
            self._forget(key)
        else:
            record.phase = Phase.CLOSING
            record.aborted = abort
            record.undrained = set(range(self._pages.ring_size))
        return True

    @property
    def _num_requests(self) -> int:
        """Those are counted, too, whose blocks are being fetched and that are submitted afterwards."""
        return self.active_jobs + self.fills.num_under_way

    @property
    def _is_full(self) -> bool:
        return self._num_requests >= self._max_jobs

    def begin_fill(self, order: FillOrder) -> bool:
        """Have blocks of a request fetched; False when there is nothing to fetch, no room for it, or no place for the
        request, which `submit` refuses then. How it ends is an event."""
        if self._is_full:
            return False
        begins, evicted = self.fills.begin(order)
        if evicted:
            self._events.append(CacheChanged(removed=tuple(evicted)))
        return begins

    def give_up_fill(self, key: str, reason: str) -> None:
        """End a fill early; legal at any time."""
        self._room += 1
        self._events += self.fills.give_up(key, reason)

    def fence_writer(self, fence: ring_pb2.RingFence) -> int:
        """Let every rank take lives of a node for dead; return the pages that they may still write."""
        self._fences.append(fence)
        alive = incarnation_from_pb(fence.alive) if fence.HasField("alive") else None
        return self.fills.pages_of(fence.writer.name, start_id=fence.writer.start_id, alive=alive)

    def plan(self, now_s: float) -> ring_pb2.RingStep:
        """Return the next step: opens, one chunk if there is one to run, pushes, closes. An empty step is a tick."""
        self._step_id += 1
        self._room_planned = self._room
        step = ring_pb2.RingStep(step_id=self._step_id)
        step.opens.extend(self._admit(now_s))
        self._chunk = self._scheduler.next_chunk()
        if self._chunk is not None:
            step.chunk.CopyFrom(self._chunk_message(self._chunk))
        for key, record in self._records.items():
            if record.phase is Phase.CLOSING and not record.close_sent:
                record.close_sent = True
                step.closes.append(key)
                if record.aborted:
                    step.aborts.append(key)
        self.pushes.plan(step)
        self.fills.plan(step)
        step.fences.extend(self._fences)
        self._fences.clear()
        return step

    def applied(self, reports: Sequence[ring_pb2.RankReport]) -> list[Event]:
        """Take in what every rank says about the step that `plan` returned, and return what came of it."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None and not any(report.stopped for report in reports):
            self._scheduler.ran(chunk)
            self._commit(chunk)
        for report in reports:
            self._events += [HandoffFailed(key, reason) for key, reason in report.failed.items()]
            for key in report.drained:
                self._drained(key, report.rank)
            self._events += self.fills.reported(report)
            self._room += len(report.fills_landed) + len(report.fills_failed) + len(report.fills_free)
            for key in self.pushes.drained(report.drained, report.rank):
                self._room += 1
                self._events.append(Gone(key))
        return self.take_events()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def active_jobs(self) -> int:
        return sum(record.phase is not Phase.CLOSING for record in self._records.values())

    @property
    def closing_jobs(self) -> int:
        return sum(record.phase is Phase.CLOSING for record in self._records.values())

    @property
    def queued_jobs(self) -> int:
        return sum(record.phase is Phase.QUEUED for record in self._records.values())

    @property
    def has_chunk(self) -> bool:
        """A chunk can run now."""
        return self._scheduler.next_chunk() is not None

    @property
    def wants_step(self) -> bool:
        """The next step would do something; otherwise it may wait for a command, a report or a time limit."""
        if self._fences or self.pushes.wants_step or self.fills.wants_step:
            return True
        if self.has_chunk or (self._room != self._room_planned and self.queued_jobs):
            return True
        return any(r.phase is Phase.CLOSING and not r.close_sent for r in self._records.values())

    def queued_tokens(self) -> int:
        """Return the prompt tokens that wait or are in work."""
        waiting = (r.job.prompt_tokens for r in self._records.values() if r.phase is Phase.QUEUED)
        return sum(waiting) + self._scheduler.tokens_left()

    @property
    def free_pages(self) -> int:
        return self._pages.free_pages

    def account(self) -> PageAccount:
        return self._pages.account()

    def cached_hashes(self) -> list[bytes]:
        """Return the names of all cached blocks, to publish them again."""
        return self._pages.cached_hashes()

    def cached_tokens(self, key: str) -> int:
        """Return how many tokens of an open job came from the cache."""
        pages = self._records[key].pages
        return 0 if pages is None else pages.cached_tokens

    def phases(self) -> Counter[Phase]:
        """Return how many jobs are in each phase."""
        return Counter(record.phase for record in self._records.values())

    def phase_of(self, key: str) -> Phase | None:
        record = self._records.get(key)
        return self.pushes.phase_of(key) if record is None else record.phase

    def _admit(self, now_s: float) -> Iterable[ring_pb2.RingOpen]:
        opens: list[ring_pb2.RingOpen] = []
        short: list[_Record] = []  # lack room; may be overtaken a bounded number of times
        for key, record in list(self._records.items()):
            if record.phase is not Phase.QUEUED:
                continue
            if record.short_since != self._room:  # else nothing has changed since it found no room
                if self._waits_for_prefix(record, now_s):
                    continue
                self._take_pages(record)
            if record.pages is None:
                short.append(record)
                if record.overtaken >= _MAX_OVERTAKEN or len(short) >= _MAX_SHORT:
                    break
                continue
            for passed in short:
                passed.overtaken += 1
            opens.append(self._open(key, record, now_s))
        return opens

    def _take_pages(self, record: _Record) -> None:
        record.pages, evicted = self._pages.take(record.job.usable_hashes, record.job.prompt_tokens)
        record.short_since = self._room if record.pages is None else None
        if evicted:
            self._events.append(CacheChanged(removed=tuple(evicted)))

    def _open(self, key: str, record: _Record, now_s: float) -> ring_pb2.RingOpen:
        assert record.pages is not None, "a job opens with its pages"
        job, cached_tokens = record.job, record.pages.cached_tokens
        record.phase = Phase.RUNNING
        record.committed_blocks = cached_tokens // self._block_tokens
        record.sent_pages = cached_tokens // self._pages.page_tokens
        for block in job.block_hashes[record.committed_blocks :]:
            self._computing.setdefault(block, key)
        self._scheduler.add(key, Span(cached_tokens, job.prompt_tokens))
        self._events.append(Opened(key, cached_tokens, now_s - record.submitted_s))
        return ring_pb2.RingOpen(
            request=job.request,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=cached_tokens,
            cached_pages=owned_runs(record.pages.pages, Span(0, record.sent_pages)),
            ticket=job.ticket,
            prompt_logprobs=job.sampling.prompt_logprobs,
        )

    def _waits_for_prefix(self, record: _Record, now_s: float) -> bool:
        """True while another job computes the first block that this one would have to compute."""
        hashes = record.job.usable_hashes
        if record.waits_for is None or record.waits_for not in self._computing:
            cached = self._pages.cached_blocks(hashes)
            missing = hashes[cached] if cached < len(hashes) else None
            if missing is None or missing not in self._computing:
                record.waits_for = None
                return False
            record.waits_for, record.waiting_since_s = missing, now_s  # the bound counts from the last progress
        return now_s - record.waiting_since_s < self._prefix_wait_s

    def _chunk_message(self, chunk: NextChunk) -> ring_pb2.RingChunk:
        record = self._records[chunk.request_id]
        assert record.pages is not None, "a running job has pages"
        known, record.sent_pages = record.sent_pages, -(-chunk.tokens.end // self._pages.page_tokens)
        return ring_pb2.RingChunk(
            request_id=chunk.request_id,
            tokens=span_to_pb(chunk.tokens),
            packed_ids=pack_ids(record.job.prompt_T[chunk.tokens.start : chunk.tokens.end]),
            new_pages=owned_runs(record.pages.pages, Span(known, record.sent_pages)),
            is_last=chunk.is_last,
            next_id=None if chunk.is_last else int(record.job.prompt_T[chunk.tokens.end]),
        )

    def _commit(self, chunk: NextChunk) -> None:
        record = self._records.get(chunk.request_id)
        if record is None or record.pages is None or record.phase is not Phase.RUNNING:
            return
        done = min(chunk.tokens.end // self._block_tokens, len(record.job.block_hashes))
        blocks = Span(record.committed_blocks, max(done, record.committed_blocks))
        added = self._pages.commit(record.job.block_hashes, record.pages, blocks)
        for block in record.job.block_hashes[blocks.start : blocks.end]:
            if self._computing.get(block) == chunk.request_id:
                del self._computing[block]
        record.committed_blocks = blocks.end
        if added:
            self._room += 1  # a job that begins with these blocks needs fewer pages
            self._events.append(CacheChanged(added=tuple(added)))
        self._events.append(Computed(chunk.request_id, chunk.tokens.end))
        if chunk.is_last:
            self._release_claims(chunk.request_id)
            record.phase = Phase.SEALING

    def _drained(self, key: str, rank: int) -> None:
        record = self._records.get(key)
        if record is None:
            return
        record.undrained.discard(rank)
        if record.phase is Phase.CLOSING and record.close_sent and not record.undrained:
            assert record.pages is not None, "only a job with pages drains"
            self._pages.release(record.pages.pages)
            self._room += 1
            self._forget(key)

    def _forget(self, key: str) -> None:
        del self._records[key]
        self._events.append(Gone(key))

    def _release_claims(self, key: str) -> None:
        for block in self._records[key].job.block_hashes:
            if self._computing.get(block) == key:
                del self._computing[block]
