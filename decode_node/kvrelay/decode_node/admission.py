"""Which requests get pages, and which pages they get. Pure; owned by the asyncio thread.

A request gets the pages of its prompt and of its longest output at once, so that a running request can never run out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.core.errors import CapacityError, InvalidRequestError
from kvrelay.kvcache.allocator import PageAccount, PageAllocator, pages_of
from kvrelay.kvcache.prefix_cache import PrefixCache

# Evicting makes room for this share of all pages more than is needed: what is free then lies in runs twice as long as
# when every fragment is handed out again at once, and long runs are what the relay writes fast.
_SPARE_SHARE = 32


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages of one request; it holds each of them once."""

    pages: tuple[int, ...]  # in token order, for prompt and output
    resident_tokens: int  # whole blocks that are here already
    evicted: tuple[bytes, ...]  # blocks that had to go


class PageBook:
    """The allocator of a node and the prefix cache over it."""

    def __init__(self, *, num_pages: int, page_tokens: int, block_tokens: int) -> None:
        self._allocator = PageAllocator(num_pages)
        self._cache: PrefixCache[int] = PrefixCache(self._allocator)
        self._page_tokens = page_tokens
        self._pages_per_block = block_tokens // page_tokens

    def reserve(self, *, prompt_tokens: int, max_tokens: int, hashes: Sequence[bytes]) -> Grant:
        """Pin the resident prefix and take new pages for the rest; evict cached blocks when that is needed.

        Args:
            hashes: names of the prompt's full blocks; empty when the cache is not to be used.

        Raises:
            InvalidRequestError: even an empty node could not hold the request.
            CapacityError: there is no room now. Nothing was taken or evicted.
        """
        # The last token is never fed back, so it needs no row.
        num_pages = -(-(prompt_tokens + max_tokens - 1) // self._page_tokens)
        if num_pages > self._allocator.num_pages:
            raise InvalidRequestError(
                f"{prompt_tokens} prompt tokens and {max_tokens} to generate need {num_pages} pages of "
                f"{self._page_tokens} tokens; this node has {self._allocator.num_pages}"
            )
        resident = [page for block in self._cache.match(hashes) for page in block]
        self._allocator.retain(resident)
        try:
            evicted = self._make_room(num_pages - len(resident))
        except CapacityError:
            self._allocator.release(resident)
            raise
        fresh = pages_of(self._allocator.allocate(num_pages - len(resident)))
        return Grant((*resident, *fresh), len(resident) * self._page_tokens, tuple(evicted))

    def pin(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Hold the pages of cached blocks, for `release` to let go of; return them in token order.

        Raises:
            StaleMessageError: some block is not here any more.
        """
        pages = self._cache.match_whole(hashes)
        self._allocator.retain(pages)
        return pages

    def resident_tokens(self, hashes: Sequence[bytes]) -> int:
        """Return how many tokens of a prompt with these blocks are here."""
        return len(self._cache.match(hashes)) * self._pages_per_block * self._page_tokens

    def cache_blocks(self, hashes: Sequence[bytes], pages: Sequence[int]) -> list[bytes]:
        """Cache the full blocks of a request whose rows are all written; return those that are new.

        Args:
            hashes: names of blocks 0, 1, ... of the request.
            pages: its pages in token order, held by the request; more than the blocks need is fine.
        """
        added: list[bytes] = []
        self._cache.match(hashes)  # marks the whole chain as used
        parent: bytes | None = None
        for index, name in enumerate(hashes):
            first = index * self._pages_per_block
            if self._cache.insert(name, pages[first : first + self._pages_per_block], parent=parent):
                added.append(name)
            parent = name
        return added

    def release(self, pages: Iterable[int]) -> None:
        """Drop a request's hold on its pages; cached ones stay with the cache."""
        self._allocator.release(pages)

    def quarantine(self, pages: Iterable[int]) -> None:
        self._allocator.quarantine(pages)

    def unquarantine(self, pages: Iterable[int]) -> None:
        self._allocator.unquarantine(pages)

    def cached_hashes(self) -> list[bytes]:
        """Return the name of every cached block, parents first."""
        return self._cache.hashes()

    @property
    def free_pages(self) -> int:
        """Pages that a request could get: free ones and those that only the cache holds."""
        return self._allocator.free_pages + self._cache.evictable_pages

    def account(self) -> PageAccount:
        allocator = self._allocator
        cached = self._cache.evictable_pages
        pinned = allocator.num_pages - allocator.free_pages - cached - allocator.quarantined_pages
        return PageAccount(allocator.num_pages, allocator.free_pages, cached, pinned, allocator.quarantined_pages)

    def check(self) -> None:
        """Assert the invariants of allocator and cache."""
        self._allocator.check()
        self._cache.check()

    def _make_room(self, num_pages: int) -> list[bytes]:
        missing = num_pages - self._allocator.free_pages
        if missing <= 0:
            return []
        evictable = self._cache.evictable_pages
        if missing > evictable:
            raise CapacityError(
                f"{num_pages} pages wanted, {self._allocator.free_pages} of {self._allocator.num_pages} free, "
                f"{evictable} evictable"
            )
        spare = self._allocator.num_pages // _SPARE_SHARE
        return self._cache.evict(min(missing + spare, evictable))
