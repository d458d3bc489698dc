"""Which queued jobs get their pages: in order of arrival, small ones past those that lack room, within bounds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvrelay.core.shard import Span
from kvrelay.prefill_node.host_loads import load_from_host
from kvrelay.prefill_node.job_record import JobRecord
from kvrelay.prefill_node.jobs import Job, Phase
from kvrelay.prefill_node.pages import LoadStart, RingPages

_MAX_OVERTAKEN = 16  # times a job that lacks room may be passed by smaller ones
_MAX_SHORT = 8  # jobs that lack room before the rest of the queue waits; bounds the work of one plan


class Admission:
    """Owned by the step thread of rank 0."""

    def __init__(
        self,
        pages: RingPages,
        *,
        block_tokens: int,
        prefix_wait_s: float,
        computing: Mapping[bytes, str],
        on_evicted: Callable[[Sequence[bytes]], None],
    ) -> None:
        """
        Args:
            prefix_wait_s: longest wait for a block that is coming.
            computing: blocks that are.
            on_evicted: told of blocks that went, after each change of the pages.
        """
        self.load_pays: Callable[[Span], bool] = lambda tokens: True  # load them from host memory, or compute them?
        self._pages = pages
        self._block_tokens = block_tokens
        self._prefix_wait_s = prefix_wait_s
        self._computing = computing
        self._on_evicted = on_evicted
        self._room = 0  # grows whenever a job that found no room might find some
        self._room_seen = 0  # its value when it was last looked for

    def more_room(self) -> None:
        """A job that found no room might find some now."""
        self._room += 1

    @property
    def is_due(self) -> bool:
        """There may be room that was not there when it was last looked for."""
        return self._room != self._room_seen

    def admit(self, records: Iterable[JobRecord], now_s: float) -> Iterator[JobRecord]:
        """Yield the queued ones that now have their pages.

        Args:
            records: in order of arrival.
        """
        self._room_seen = self._room
        short: list[JobRecord] = []  # lack room; may be overtaken a bounded number of times
        for record in records:
            if record.phase is not Phase.QUEUED:
                continue
            if record.short_since != self._room:  # else nothing has changed since it found no room
                if self._waits_for_prefix(record, now_s):
                    continue
                if self._load_from_host(record):
                    continue
                if record.short_since != self._room:
                    self._take_pages(record)
            if record.pages is None:
                short.append(record)
                if record.overtaken >= _MAX_OVERTAKEN or len(short) >= _MAX_SHORT:
                    break
                continue
            for passed in short:
                passed.overtaken += 1
            yield record

    def would_compute(self, job: Job) -> Span | None:
        """Return which tokens a job would have to compute if it came now; None: it would have to wait."""
        hashes = job.usable_hashes
        cached = self._pages.cached_blocks(hashes)
        if cached < len(hashes) and self._is_coming(hashes[cached]):
            return None
        page_tokens = self._pages.page_tokens
        cached_pages = min(cached * self._block_tokens, job.prompt_tokens - 1) // page_tokens
        if not self._pages.may_have_room(-(-job.prompt_tokens // page_tokens) - cached_pages):
            return None
        return Span(cached_pages * page_tokens, job.prompt_tokens)

    def _take_pages(self, record: JobRecord) -> None:
        record.pages, evicted = self._pages.take(record.job.usable_hashes, record.job.prompt_tokens)
        record.short_since = self._room if record.pages is None else None
        self._on_evicted(evicted)

    def _load_from_host(self, record: JobRecord) -> bool:
        """True when blocks are on their way from host memory, and so waited for like a prefix that is computed."""
        start, evicted = load_from_host(self._pages, record, block_tokens=self._block_tokens, pays=self.load_pays)
        self._on_evicted(evicted)
        if start is LoadStart.LATER:
            record.short_since = self._room
        return start is LoadStart.BEGUN

    def _waits_for_prefix(self, record: JobRecord, now_s: float) -> bool:
        """True while the first block that this job would have to compute is coming otherwise."""
        hashes = record.job.usable_hashes
        if record.waits_for is None or not self._is_coming(record.waits_for):
            cached = self._pages.cached_blocks(hashes)
            missing = hashes[cached] if cached < len(hashes) else None
            if missing is None or not self._is_coming(missing):
                record.waits_for = None
                return False
            record.waits_for, record.waiting_since_s = missing, now_s  # the bound counts from the last progress
        return now_s - record.waiting_since_s < self._prefix_wait_s

    def _is_coming(self, block: bytes) -> bool:
        """Another job computes it, another node fills it, or it is being copied to or from host memory."""
        return block in self._computing or self._pages.is_moving(block)
