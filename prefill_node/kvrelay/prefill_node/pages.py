"""Pages of all ranks of a ring: who owns which page of which prompt, what is cached, and what room is left.

All bookkeeping lives on rank 0; the other ranks only obey. A page is named (rank, page). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kvrelay.core.errors import InvalidRequestError, StaleMessageError
from kvrelay.core.shard import Span
from kvrelay.kvcache.allocator import PageAccount, PageAllocator, pages_of
from kvrelay.kvcache.prefix_cache import PrefixCache
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.scheduler import chunks_of

RankPage = tuple[int, int]  # (rank, page of that rank's pool)


@dataclass(frozen=True, slots=True)
class RequestPages:
    """The one block table of a request: prompt page k is pages[k]. The request holds a reference to each."""

    pages: tuple[RankPage, ...]
    cached_tokens: int  # a multiple of the page size


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
    ) -> None:
        self._allocators = tuple(PageAllocator(number) for number in pages_per_rank)
        self._cache: PrefixCache[RankPage] = PrefixCache(self)
        self.page_tokens = page_tokens
        self._pages_per_block = block_tokens // page_tokens
        self._chunk_tokens = chunk_tokens
        self._align_tokens = align_tokens

    @property
    def ring_size(self) -> int:
        return len(self._allocators)

    @property
    def free_pages(self) -> int:
        return sum(allocator.free_pages for allocator in self._allocators)

    # What the prefix cache needs of the allocators.
    def retain(self, pages: Iterable[RankPage], /) -> None:
        for rank, numbers in _by_rank(pages).items():
            self._allocators[rank].retain(numbers)

    def release(self, pages: Iterable[RankPage], /) -> tuple[RankPage, ...]:
        """Drop one reference of each page; return those that are free again."""
        freed: list[RankPage] = []
        for rank, numbers in _by_rank(pages).items():
            freed += ((rank, page) for page in self._allocators[rank].release(numbers))
        return tuple(freed)

    def refcount(self, page: RankPage, /) -> int:
        return self._allocators[page[0]].refcount(page[1])

    def quarantine(self, pages: Iterable[RankPage]) -> None:
        for rank, numbers in _by_rank(pages).items():
            self._allocators[rank].quarantine(numbers)

    def unquarantine(self, pages: Iterable[RankPage]) -> None:
        for rank, numbers in _by_rank(pages).items():
            self._allocators[rank].unquarantine(numbers)

    def cached_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are cached."""
        return len(self._cache.match(hashes))

    def pin(self, hashes: Sequence[bytes]) -> tuple[RankPage, ...]:
        """Hold the pages of cached blocks, for `release` to let go of; return them in token order.

        Raises:
            StaleMessageError: some block is not here any more.
        """
        found = self._cache.match(hashes)
        if len(found) < len(hashes):
            raise StaleMessageError(f"{len(found)} of {len(hashes)} blocks are here")
        pages = tuple(page for block in found for page in block)
        self.retain(pages)
        return pages

    def refuse_impossible(self, prompt_tokens: int) -> None:
        """Raise when even an empty node could not hold the prompt.

        Raises:
            InvalidRequestError: names the pages wanted and there.
        """
        for rank, wanted in enumerate(self._wanted(0, prompt_tokens)):
            if wanted > self._allocators[rank].num_pages:
                raise InvalidRequestError(
                    f"a prompt of {prompt_tokens} tokens needs {wanted} pages of rank {rank},"
                    f" which has {self._allocators[rank].num_pages}"
                )

    def take(self, hashes: Sequence[bytes], prompt_tokens: int) -> tuple[RequestPages | None, list[bytes]]:
        """Reserve all pages of a prompt: cached ones are shared, the others are new; evicts what it must.

        Reserving everything at once means that no request can get stuck half way for want of a page.

        Returns:
            (pages, hashes of evicted blocks); pages is None when there is no room now.
        """
        cached = [page for block in self._cache.match(hashes) for page in block]
        cached = cached[: (prompt_tokens - 1) // self.page_tokens]
        self.retain(cached)
        if not self._may_have_room(-(-prompt_tokens // self.page_tokens) - len(cached)):
            self.release(cached)
            return None, []
        cached_tokens = len(cached) * self.page_tokens
        owners = self._owners(cached_tokens, prompt_tokens)
        wanted = Counter(owners)
        if not self._can_make_room(wanted):
            self.release(cached)
            return None, []
        evicted = self._make_room(wanted)
        fresh = {rank: iter(pages_of(self._allocators[rank].allocate(number))) for rank, number in wanted.items()}
        pages = (*cached, *((rank, next(fresh[rank])) for rank in owners))
        return RequestPages(pages, cached_tokens), evicted

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
        total = sum(allocator.num_pages for allocator in self._allocators)
        free = self.free_pages
        quarantined = sum(allocator.quarantined_pages for allocator in self._allocators)
        cached = self._cache.evictable_pages
        return PageAccount(total, free, cached, total - free - cached - quarantined, quarantined)

    def cached_hashes(self) -> list[bytes]:
        """Return the name of every cached block, to publish them all again."""
        return self._cache.hashes()

    def check(self) -> None:
        """Assert the invariants of the allocators and of the cache."""
        for allocator in self._allocators:
            allocator.check()
        self._cache.check()

    def _may_have_room(self, num_pages: int) -> bool:
        """False: not even all ranks together have room, so nothing is worked out or evicted in vain."""
        return self.free_pages >= num_pages or self.free_pages + self._cache.evictable_pages >= num_pages

    def _missing(self, rank: int, number: int) -> int:
        return number - self._allocators[rank].free_pages

    def _can_make_room(self, wanted: Counter[int]) -> bool:
        """False: some rank would stay short even without its cached pages."""
        return all(
            (missing := self._missing(rank, number)) <= 0 or self._num_evictable(rank) >= missing
            for rank, number in wanted.items()
        )

    def _num_evictable(self, rank: int) -> int:
        return self._cache.evictable_pages if self.ring_size == 1 else self._cache.num_evictable(partial(_is_of, rank))

    def _make_room(self, wanted: Counter[int]) -> list[bytes]:
        """Evict for the ranks that are short, and only for them; return the hashes of what went."""
        evicted: list[bytes] = []
        for rank, number in wanted.items():
            if (missing := self._missing(rank, number)) > 0:
                evicted += self._cache.evict(missing, partial(_is_of, rank))
        return evicted

    def _owners(self, cached_tokens: int, prompt_tokens: int) -> list[int]:
        """Return the owner rank of each prompt page behind the cached ones. They depend on the chunks alone."""
        owners: list[int] = []
        counts = [0] * self.ring_size
        first_page = cached_tokens // self.page_tokens
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


def _by_rank(pages: Iterable[RankPage]) -> dict[int, list[int]]:
    by_rank: dict[int, list[int]] = {}
    for rank, page in pages:
        by_rank.setdefault(rank, []).append(page)
    return by_rank
