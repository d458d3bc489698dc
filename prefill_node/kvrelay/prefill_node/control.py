"""Rank 0's decisions: who is let in, which chunk runs next, whose pages come back. Events in, ring steps out.

A job is QUEUED until it has all its pages, RUNNING while chunks are left, SEALING while its hand-off ends, CLOSING
until every rank has said that none of its writes can still read the pages. Pages are held from RUNNING to the end of
CLOSING; blocks that every layer of every rank has computed stay behind in the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvrelay.core.errors import CapacityError, StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters
from kvrelay.kvcache.allocator import PageAccount
from kvrelay.prefill_node.admission import Admission
from kvrelay.prefill_node.closing import Closing
from kvrelay.prefill_node.fills import FillOrder, Fills
from kvrelay.prefill_node.giving_way import WHOLE, Turn
from kvrelay.prefill_node.job_record import JobRecord, chunk_message, open_message
from kvrelay.prefill_node.jobs import CacheChanged, Computed, Event, Gone, HandoffFailed, Job, Opened, Phase
from kvrelay.prefill_node.pages import RingPages
from kvrelay.prefill_node.pushes import Pushes
from kvrelay.prefill_node.scheduler import ChunkScheduler, NextChunk
from kvrelay.proto.convert import incarnation_from_pb
from kvrelay.proto.v1 import ring_pb2


class RingControl:
    """Owned by the step thread of rank 0; never waits, reads no clock, touches no device."""

    def __init__(
        self, pages: RingPages, *, block_tokens: int, chunk_tokens: int, max_jobs: int, prefix_wait_s: float
    ) -> None:
        self._pages = pages
        self._block_tokens = block_tokens
        self._max_jobs = max_jobs
        self.scheduler = ChunkScheduler(chunk_tokens=chunk_tokens)
        self._records: dict[str, JobRecord] = {}  # in order of arrival
        self._computing: dict[bytes, str] = {}  # block -> the job that computes it, or the fill that brings it
        self.fills = Fills(pages, block_tokens=block_tokens, computing=self._computing)
        self.pushes = Pushes(pages, most=max_jobs)
        self.admission = Admission(
            pages,
            block_tokens=block_tokens,
            prefix_wait_s=prefix_wait_s,
            computing=self._computing,
            on_evicted=lambda evicted: self._note_cache(removed=evicted),
        )
        self._step_id = 0
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
        self._records[job.key] = JobRecord(job, now_s)

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
        self.scheduler.remove(key)
        self._release_claims(key)
        if record.pages is None:
            self._forget(key)
        else:
            record.phase = Phase.CLOSING
            record.closing = Closing(ring_size=self._pages.ring_size, abort=abort)
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
        self._note_cache(removed=evicted)
        return begins

    def give_up_fill(self, key: str, reason: str) -> None:
        """End a fill early; legal at any time."""
        self.admission.more_room()
        self._events += self.fills.give_up(key, reason)

    def fence_writer(self, fence: ring_pb2.RingFence) -> int:
        """Let every rank take lives of a node for dead; return the pages that they may still write."""
        self._fences.append(fence)
        alive = incarnation_from_pb(fence.alive) if fence.HasField("alive") else None
        return self.fills.pages_of(fence.writer.name, start_id=fence.writer.start_id, alive=alive)

    def plan(self, now_s: float) -> ring_pb2.RingStep:
        """Return the next step: opens, one chunk if there is one to run, pushes, closes. An empty step is a tick."""
        self._step_id += 1
        step = ring_pb2.RingStep(step_id=self._step_id)
        step.opens.extend(
            self._open(record, now_s) for record in self.admission.admit(list(self._records.values()), now_s)
        )
        step.copies.extend(self._pages.copies_to_tell())
        self._chunk = self.scheduler.next_chunk()
        if self._chunk is not None:
            record = self._records[self._chunk.request_id]
            step.chunk.CopyFrom(chunk_message(record, self._chunk, page_tokens=self._pages.page_tokens))
        for key, record in self._records.items():
            if record.closing is not None:
                record.closing.plan(step, key)
        self.pushes.plan(step)
        self.fills.plan(step)
        step.fences.extend(self._fences)
        self._fences.clear()
        return step

    def applied(self, reports: Sequence[ring_pb2.RankReport], turn: Turn = WHOLE) -> list[Event]:
        """Take in what every rank says about the step that `plan` returned, and return what came of it."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self._ended(chunk, reports, turn)
        for report in reports:
            self._events += [HandoffFailed(key, reason) for key, reason in report.failed.items()]
            for key in report.drained:
                self._drained(key, report.rank)
            self._events += self.fills.reported(report)
            if report.fills_landed or report.fills_failed or report.fills_free:
                self.admission.more_room()
            for key in self.pushes.drained(report.drained, report.rank):
                self.admission.more_room()
                self._events.append(Gone(key))
            any_copied, added = self._pages.copied(report.rank, report.copied)
            if any_copied:
                self.admission.more_room()
            self._note_cache(added=added)
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
        return self.scheduler.next_chunk() is not None

    @property
    def wants_step(self) -> bool:
        """The next step would do something; otherwise it may wait for a command, a report or a time limit."""
        if self._fences or self.pushes.wants_step or self.fills.wants_step or self._pages.has_copies_to_tell:
            return True
        if self.has_chunk or (self.admission.is_due and self.queued_jobs):
            return True
        return any(r.closing is not None and not r.closing.told for r in self._records.values())

    @property
    def awaits_step_end(self) -> bool:
        """Somebody waits for what the ranks say, or are told, between two steps."""
        return bool(self.is_copying or self.fills.num_under_way or self.closing_jobs or self.pushes.num_closing)

    def would_compute(self, job: Job) -> Span | None:
        """Return which tokens a job that is about to be submitted would have to compute; None: it could not begin."""
        return None if self._is_full else self.admission.would_compute(job)

    @property
    def is_copying(self) -> bool:
        """Blocks are on their way to or from host memory: the ranks will report their end."""
        return self._pages.num_moving > 0

    @property
    def host_counters(self) -> Sequence[Counters]:
        host = self._pages.host
        return () if host is None else (host.counters,)

    def queued_tokens(self) -> int:
        """Return the prompt tokens that wait or are in work."""
        waiting = (r.job.prompt_tokens for r in self._records.values() if r.phase is Phase.QUEUED)
        return sum(waiting) + self.scheduler.tokens_left()

    @property
    def free_pages(self) -> int:
        return self._pages.held.free_pages

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

    def _note_cache(self, *, added: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        host = self._pages.take_host_change()
        if added or removed or host.added or host.removed:
            self._events.append(CacheChanged(tuple(added), tuple(removed), host.added, host.removed))

    def _open(self, record: JobRecord, now_s: float) -> ring_pb2.RingOpen:
        assert record.pages is not None, "a job opens with its pages"
        key, job, cached_tokens = record.job.key, record.job, record.pages.cached_tokens
        record.phase = Phase.RUNNING
        record.committed_blocks = cached_tokens // self._block_tokens
        for block in job.block_hashes[record.committed_blocks :]:
            self._computing.setdefault(block, key)
        self.scheduler.add(key, Span(cached_tokens, job.prompt_tokens))
        self._events.append(Opened(key, cached_tokens, now_s - record.submitted_s))
        return open_message(record, page_tokens=self._pages.page_tokens)

    def _ended(self, chunk: NextChunk, reports: Sequence[ring_pb2.RankReport], turn: Turn) -> None:
        """Take in whether a chunk was computed, or stopped or paused, which all ranks did at one layer."""
        left = {report.layers_left for report in reports if report.HasField("layers_left")}
        if any(report.stopped for report in reports):
            self.scheduler.lost(chunk)
        elif left:
            (layers_left,) = left
            self.scheduler.paused(chunk, turn.took_s, left=layers_left / turn.num_layers, favoured=turn.favoured)
        else:
            self.scheduler.ran(chunk, turn.took_s)
            self._commit(chunk)

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
            self.admission.more_room()  # a job that begins with these blocks needs fewer pages
            self._note_cache(added=added)
        self._events.append(Computed(chunk.request_id, chunk.tokens.end))
        if chunk.is_last:
            self._release_claims(chunk.request_id)
            record.phase = Phase.SEALING

    def _drained(self, key: str, rank: int) -> None:
        record = self._records.get(key)
        if record is not None and record.closing is not None and record.closing.drained(rank):
            assert record.pages is not None, "only a job with pages drains"
            self._pages.held.release(record.pages.pages)
            self.admission.more_room()
            self._forget(key)

    def _forget(self, key: str) -> None:
        del self._records[key]
        self._events.append(Gone(key))

    def _release_claims(self, key: str) -> None:
        for block in self._records[key].job.block_hashes:
            if self._computing.get(block) == key:
                del self._computing[block]
