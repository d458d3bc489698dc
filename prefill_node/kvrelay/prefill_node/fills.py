"""Pages that another node fills: blocks of a prompt that it has and this ring lacks. Pure.

Every rank has the pages fetched that it owns. The blocks are cached when they have landed on all of these ranks, and
given up when one of them has failed. From `begin` until the source can write no more on any rank, a fill holds its
pages, whatever becomes of it. What it fills counts as being computed: others wait for it, and take over when it fails.
Owned by the step thread of rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.shard import Span
from kvrelay.core.types import Incarnation
from kvrelay.prefill_node.jobs import CacheChanged, Event, FillEnded
from kvrelay.prefill_node.owned_runs import owned_runs
from kvrelay.prefill_node.pages import RequestPages, RingPages
from kvrelay.prefill_node.rank_pages import RankPage
from kvrelay.proto.convert import incarnation_to_pb, ms_to_pb
from kvrelay.proto.v1 import common_pb2, ring_pb2


@dataclass(frozen=True, slots=True)
class PullFrom:
    """Who has how much of a prompt, as the router believes."""

    node: Incarnation
    endpoint: str
    tokens: int
    ring_size: int = 1


@dataclass(frozen=True, slots=True)
class FillOrder:
    """What is to be fetched for a request."""

    key: str
    request: common_pb2.RequestRef
    source: PullFrom
    hashes: tuple[bytes, ...]  # of the prompt's first blocks; those that are here are not fetched
    timeout_s: float


@dataclass(slots=True)
class _Record:
    order: FillOrder
    pages: RequestPages
    awaited: set[int]  # ranks on which it has not landed
    unfree: set[int]  # ranks on which the source may still write
    under_way: bool = True  # neither complete nor given up
    complete: bool = False
    told: bool = False  # the ranks know of it
    end_told: bool = False
    quarantined: set[int] = field(default_factory=set)  # ranks whose pages are


class Fills:
    def __init__(self, pages: RingPages, *, block_tokens: int, computing: dict[bytes, str]) -> None:
        """`computing`: block -> who computes it; of the owner, entered here too."""
        self._pages = pages
        self._block_tokens = block_tokens
        self._computing = computing
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        """Return how many hold pages."""
        return len(self._records)

    @property
    def num_under_way(self) -> int:
        """Return how many requests wait for theirs."""
        return sum(record.under_way for record in self._records.values())

    @property
    def wants_step(self) -> bool:
        """The ranks are to be told something."""
        return any(not one.told or (not one.under_way and not one.end_told) for one in self._records.values())

    def begin(self, order: FillOrder) -> tuple[bool, list[bytes]]:
        """Take pages for blocks of a prompt, to be fetched from the next step on.

        Returns:
            (whether it begins, hashes of evicted blocks). It does not when all blocks are here, when the first one that
            is missing is being computed, or when there is no room.
        """
        assert order.key not in self._records, f"{order.key} has begun already"
        hashes = order.hashes
        cached = self._pages.cached_blocks(hashes)
        if cached == len(hashes) or hashes[cached] in self._computing:
            return False, []
        pages, evicted = self._pages.take(hashes, len(hashes) * self._block_tokens)
        if pages is None:
            return False, evicted
        ranks = {rank for rank, _ in self._writable(pages)}
        self._records[order.key] = _Record(order, pages, set(ranks), set(ranks))
        for block in hashes[cached:]:
            self._computing.setdefault(block, order.key)
        return True, evicted

    def plan(self, step: ring_pb2.RingStep) -> None:
        """Put into a step what the ranks do not know yet."""
        for key, record in self._records.items():
            if not record.told:
                record.told = True
                step.fills.append(self._message(record))
            if not record.under_way and not record.end_told:
                record.end_told = True
                (step.fills_taken if record.complete else step.fills_given_up).append(key)

    def reported(self, report: ring_pb2.RankReport) -> list[Event]:
        """Take in what a rank says, and return what came of it."""
        events: list[Event] = []
        for key in report.fills_landed:
            record = self._records[key]
            record.awaited.discard(report.rank)
            if not record.awaited and record.under_way:
                events += self._complete(record)
        for key, reason in report.fills_failed.items():
            events += self.give_up(key, reason)
        for key in report.fills_quarantined:
            record = self._records[key]
            record.quarantined.add(report.rank)
            self._pages.held.quarantine(self._of_rank(record, report.rank))
        for key in report.fills_free:
            self._freed(key, report.rank)
        return events

    def give_up(self, key: str, reason: str) -> list[Event]:
        """Nobody fills the blocks any more: whoever waits for them may compute them. A fill that has ended, or has not
        begun, is ignored."""
        record = self._records.get(key)
        if record is None or not record.under_way:
            return []
        self._end(record)
        return [FillEnded(key, reason=reason)]

    def pages_of(self, name: str, *, start_id: int, alive: Incarnation | None) -> int:
        """Return how many pages lives of a node may still write: the one with `start_id`, or for 0 all but `alive`."""
        return sum(
            len(self._of_rank(record, rank))
            for record in self._records.values()
            if (source := record.order.source.node).name == name
            and source != alive
            and start_id in (0, source.start_id)
            for rank in record.unfree
        )

    def _complete(self, record: _Record) -> list[Event]:
        """Cache the blocks, whose rows are all there and right."""
        self._end(record)
        record.complete = True
        blocks = Span(record.pages.cached_tokens // self._block_tokens, len(record.order.hashes))
        added = self._pages.commit(record.order.hashes, record.pages, blocks)
        ended = FillEnded(record.order.key, num_tokens=blocks.num_tokens * self._block_tokens)
        return [CacheChanged(added=tuple(added)), ended] if added else [ended]

    def _end(self, record: _Record) -> None:
        record.under_way = False
        for block in record.order.hashes:
            if self._computing.get(block) == record.order.key:
                del self._computing[block]

    def _freed(self, key: str, rank: int) -> None:
        record = self._records[key]
        assert not record.under_way or rank not in record.awaited, (
            f"{key} is over on rank {rank}, and it does not say how"
        )
        if rank in record.quarantined:
            record.quarantined.discard(rank)
            self._pages.held.unquarantine(self._of_rank(record, rank))
        record.unfree.discard(rank)
        if not record.unfree and not record.under_way:
            self._pages.held.release(record.pages.pages)
            del self._records[key]

    def _message(self, record: _Record) -> ring_pb2.RingFill:
        order, source, pages = record.order, record.order.source, record.pages
        missing = Span(pages.cached_tokens // self._pages.page_tokens, len(pages.pages))
        return ring_pb2.RingFill(
            key=order.key,
            request=order.request,
            source=incarnation_to_pb(source.node),
            endpoint=source.endpoint,
            source_ranks=source.ring_size,
            block_hashes=order.hashes,
            pages=owned_runs(pages.pages, missing),
            timeout_ms=ms_to_pb(order.timeout_s),
        )

    def _writable(self, pages: RequestPages) -> tuple[RankPage, ...]:
        return pages.pages[pages.cached_tokens // self._pages.page_tokens :]

    def _of_rank(self, record: _Record, rank: int) -> tuple[RankPage, ...]:
        return tuple(page for page in self._writable(record.pages) if page[0] == rank)
