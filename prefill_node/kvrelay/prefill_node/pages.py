"""Pages of all ranks of a ring: who owns which page of which prompt, what is cached, and what room is left.

All bookkeeping lives on rank 0; the other ranks only obey. A page is named (rank, page). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.shard import Span
from kvrelay.kvcache.allocator import PageAccount
from kvrelay.kvcache.prefix_cache import PrefixCache
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.host_copies import HostChange, HostCopies, Loaded
from kvrelay.prefill_node.host_tier import HostTier
from kvrelay.prefill_node.rank_pages import RankAllocators, RankPage
from kvrelay.prefill_node.scheduler import chunks_of
from kvrelay.proto.v1 import ring_pb2


@dataclass(frozen=True, slots=True)
class RequestPages:
    """The one block table of a request: prompt page k is pages[k]. The request holds a reference to each."""

    pages: tuple[RankPage, ...]
    cached_tokens: int  # a multiple of the page size


class LoadStart(Enum):
    """What came of the wish to have blocks brought in from host memory."""

    BEGUN = "begun"
    LATER = "later"  # there will be room when what leaves is copied
    NO_ROOM = "no room"


class RingPages:
    """Allocators of all ranks and the prefix cache over them. Owned by the step thread of rank 0."""

    def __init__(
        self,
        *,
        pages_per_rank: Sequence[int],
        page_tokens: int,
        block_tokens: int,
        chunk_tokens: int,
        align_tokens: int,
        host_pages_per_rank: Sequence[int] = (),
        page_bytes: int = 0,
    ) -> None:
        """
        Args:
            host_pages_per_rank: of host memory for blocks that leave the cache; empty = they are lost.
            page_bytes: of one page in all layers, for the account of host memory.
        """
        self.held = RankAllocators(pages_per_rank)
        self._host: HostCopies | None = None
        if host_pages_per_rank:
            self._host = HostCopies(HostTier(host_pages_per_rank), self.held, page_bytes=page_bytes)
        self._cache: PrefixCache[RankPage] = PrefixCache(self.held, on_evict=self._host.evicted if self._host else None)
        self.page_tokens = page_tokens
        self._pages_per_block = block_tokens // page_tokens
        self._chunk_tokens = chunk_tokens
        self._align_tokens = align_tokens

    @property
    def ring_size(self) -> int:
        return len(self.held)

    def cached_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are cached."""
        return len(self._cache.match(hashes))

    def pin(self, hashes: Sequence[bytes]) -> tuple[RankPage, ...]:
        """Hold the pages of cached blocks, for `release` to let go of; return them in token order.

        Raises:
            StaleMessageError: some block is not here any more.
        """
        pages = self._cache.match_whole(hashes)
        self.held.retain(pages)
        return pages

    def refuse_impossible(self, prompt_tokens: int) -> None:
        """Raise when even an empty node could not hold the prompt.

        Raises:
            InvalidRequestError: names the pages wanted and there.
        """
        for rank, wanted in enumerate(self._wanted(0, prompt_tokens)):
            if wanted > self.held.num_pages(rank):
                raise InvalidRequestError(
                    f"a prompt of {prompt_tokens} tokens needs {wanted} pages of rank {rank},"
                    f" which has {self.held.num_pages(rank)}"
                )

    def take(self, hashes: Sequence[bytes], prompt_tokens: int) -> tuple[RequestPages | None, list[bytes]]:
        """Reserve all pages of a prompt: cached ones are shared, the others are new; evicts what it must.

        Reserving everything at once means that no request can get stuck half way for want of a page.

        Returns:
            (pages, hashes of evicted blocks); pages is None when there is no room now. With host memory behind the
            cache room comes in two calls: what the first one evicts is free when it is copied.
        """
        cached = [page for block in self._cache.match(hashes) for page in block]
        cached = cached[: (prompt_tokens - 1) // self.page_tokens]
        self.held.retain(cached)
        if not self.may_have_room(-(-prompt_tokens // self.page_tokens) - len(cached)):
            self.held.release(cached)
            return None, []
        cached_tokens = len(cached) * self.page_tokens
        owners = self._owners(cached_tokens, prompt_tokens)
        wanted = Counter(owners)
        if not self._can_make_room(wanted):
            self.held.release(cached)
            return None, []
        evicted = self._make_room(wanted)
        if self._is_short(wanted):  # until what leaves for host memory is copied
            self.held.release(cached)
            return None, evicted
        return RequestPages((*cached, *self.held.allocate(owners)), cached_tokens), evicted

    def commit(self, hashes: Sequence[bytes], pages: RequestPages, blocks: Span) -> list[bytes]:
        """Cache blocks [start, end) of a request, whose rows are all written; return the hashes that are new."""
        added: list[bytes] = []
        for index in range(blocks.start, blocks.end):
            first = index * self._pages_per_block
            parent = hashes[index - 1] if index else None
            if self._cache.insert(hashes[index], pages.pages[first : first + self._pages_per_block], parent=parent):
                added.append(hashes[index])
        return added

    def account(self) -> PageAccount:
        total, free, quarantined = self.held.total_pages, self.held.free_pages, self.held.quarantined_pages
        cached = self._cache.evictable_pages
        return PageAccount(total, free, cached, total - free - cached - quarantined, quarantined)

    def cached_hashes(self) -> list[bytes]:
        """Return the name of every cached block, to publish them all again."""
        return self._cache.hashes()

    def check(self) -> None:
        """Assert the invariants of the allocators and of the cache."""
        self.held.check()
        self._cache.check()
        if self._host is not None:
            self._host.check()

    # Host memory behind the cache.
    @property
    def host(self) -> HostCopies | None:
        return self._host

    @property
    def num_moving(self) -> int:
        """Blocks that are being copied to or from host memory."""
        return self._host.num_moving if self._host else 0

    @property
    def has_copies_to_tell(self) -> bool:
        return self._host is not None and self._host.has_unsent

    def is_moving(self, block: bytes) -> bool:
        return self._host is not None and self._host.is_moving(block)

    def in_host(self, hashes: Sequence[bytes], prompt_tokens: int) -> Span | None:
        """Return which blocks host memory has behind the cached ones, of those that the prompt can use."""
        if self._host is None:
            return None
        cached = self.cached_blocks(hashes)
        usable = -(-((prompt_tokens - 1) // self.page_tokens) // self._pages_per_block)
        found = len(self._host.found(hashes[cached:usable]))
        return Span(cached, cached + found) if found else None

    def load(self, hashes: Sequence[bytes], blocks: Span, prompt_tokens: int) -> tuple[LoadStart, list[bytes]]:
        """Begin to bring in blocks that `in_host` has found just now; each page goes to the rank whose memory has it.

        Returns:
            (what came of it, hashes of evicted blocks).
        """
        assert self._host is not None, "blocks were found in host memory"
        names = hashes[blocks.start : blocks.end]
        before = [page for block in self._cache.match(hashes[: blocks.start]) for page in block]
        in_host = self._host.found(names)
        ranks = [rank for block in in_host for rank, _ in block]
        wanted = Counter(ranks)
        self.held.retain(before)
        self._host.pin(names)  # what is evicted below must not take their place
        start, evicted = LoadStart.NO_ROOM, []
        if self.may_have_room(-(-prompt_tokens // self.page_tokens) - len(before)) and self._can_make_room(wanted):
            evicted = self._make_room(wanted)
            start = LoadStart.LATER if self._is_short(wanted) else LoadStart.BEGUN
        if start is not LoadStart.BEGUN:
            self._host.unpin(names)
            self.held.release(before)
            return start, evicted
        pages = self.held.allocate(ranks)
        fresh = iter(pages)
        placed = [tuple(islice(fresh, len(block))) for block in in_host]
        parent = hashes[blocks.start - 1] if blocks.start else None
        self._host.load(Loaded(parent, tuple(zip(names, placed, strict=True)), held=(*before, *pages)))
        return start, evicted

    def count_host_hit(self) -> None:
        """A prompt has found blocks in host memory, whether they are then loaded or not."""
        if self._host is not None:
            self._host.hit()

    def copied(self, rank: int, copy_ids: Iterable[int]) -> tuple[bool, list[bytes]]:
        """Take in which copies a rank has done; return (pages may be free, blocks that are cached now)."""
        if self._host is None:
            return False, []
        any_done, loaded = self._host.copied(rank, copy_ids)
        added: list[bytes] = []
        for chain in loaded:
            parent = chain.parent
            for name, pages in chain.blocks:
                if self._cache.insert(name, pages, parent=parent):
                    added.append(name)
                parent = name
            self.held.release(chain.held)
        return any_done, added

    def copies_to_tell(self) -> list[ring_pb2.HostCopy]:
        """Return what the ranks have to copy and were not told yet."""
        return self._host.messages() if self._host else []

    def take_host_change(self) -> HostChange:
        """Return how host memory's blocks have changed since the last call."""
        return self._host.take_change() if self._host else HostChange()

    def may_have_room(self, num_pages: int) -> bool:
        """False: not even all ranks together have room, so nothing is worked out or evicted in vain."""
        if self.held.free_pages >= num_pages:
            return True
        coming = self._host.leaving() if self._host else 0
        return self.held.free_pages + coming + self._cache.evictable_pages >= num_pages

    def _missing(self, rank: int, number: int) -> int:
        """Return how many pages more than are free, or will be when they are copied, a rank needs."""
        return number - self.held.free(rank) - (self._host.leaving(rank) if self._host else 0)

    def _is_short(self, wanted: Counter[int]) -> bool:
        return any(number > self.held.free(rank) for rank, number in wanted.items())

    def _can_make_room(self, wanted: Counter[int]) -> bool:
        """False: some rank would stay short even without its cached pages."""
        return all(
            (missing := self._missing(rank, number)) <= 0 or self.held.cached_alone_on(rank) >= missing
            for rank, number in wanted.items()
        )

    def _make_room(self, wanted: Counter[int]) -> list[bytes]:
        """Evict for the ranks that are short, and only for them; return the hashes of what went."""
        evicted: list[bytes] = []
        for rank, number in wanted.items():
            if (missing := self._missing(rank, number)) > 0:
                evicted += self._cache.evict(missing, partial(_is_of, rank))
        return evicted

    def _owners(self, cached_tokens: int, prompt_tokens: int) -> list[int]:
        """Return the owner rank of each prompt page behind the cached ones. They depend on the chunks alone."""
        first_page = cached_tokens // self.page_tokens
        if self.ring_size == 1:
            return [0] * (-(-prompt_tokens // self.page_tokens) - first_page)
        owners: list[int] = []
        counts = [0] * self.ring_size
        for chunk in chunks_of(Span(cached_tokens, prompt_tokens), chunk_tokens=self._chunk_tokens):
            added = ring_plan.assign_pages(
                chunk,
                counts,
                ring_size=self.ring_size,
                align_tokens=self._align_tokens,
                page_tokens=self.page_tokens,
                first_page=first_page + len(owners),
            )
            for rank in added:
                counts[rank] += 1
            owners += added
        return owners

    def _wanted(self, cached_tokens: int, prompt_tokens: int) -> list[int]:
        counts = Counter(self._owners(cached_tokens, prompt_tokens))
        return [counts[rank] for rank in range(self.ring_size)]


def _is_of(rank: int, page: RankPage) -> bool:
    return page[0] == rank
