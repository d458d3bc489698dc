"""Finished blocks of earlier requests, by content hash, so that a later one with the same prefix reuses them.

The cache is one more owner of its pages. It knows no pool: `Pages` counts the owners, and a page's name may be a number
(decode: one allocator) or a pair (rank, page) (prefill: one allocator per rank). Pure; owned by one thread.

Every cached block can be reached: its parent is cached too. Hence blocks leave from the leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvrelay.core.errors import StaleMessageError


def _any_page(_: object) -> bool:
    return True


class Page(Hashable, Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


PageKey = TypeVar("PageKey", bound=Page)
Page_contra = TypeVar("Page_contra", bound=Page, contravariant=True)


class Pages(Protocol[Page_contra]):
    """Who counts the owners of pages. `PageAllocator` is one of these."""

    @property
    def cached_alone(self) -> int:
        """Pages that only the cache holds."""
        ...

    def cache(self, pages: Sequence[Page_contra], /) -> None: ...

    def uncache(self, pages: Sequence[Page_contra], /) -> object: ...

    def refcount(self, page: Page_contra, /) -> int: ...


@dataclass(slots=True)
class _Block(Generic[PageKey]):
    pages: tuple[PageKey, ...]  # in token order
    parent: bytes | None  # None: first block of a prompt
    num_children: int
    used: int  # turn of the last match; never less than a child's


class PrefixCache(Generic[PageKey]):
    """Blocks by hash (see `kvrelay.core.prefix_hash`), least recently used leaf evicted first."""

    def __init__(
        self, pages: Pages[PageKey], *, on_evict: Callable[[bytes, tuple[PageKey, ...]], object] | None = None
    ) -> None:
        """`on_evict`: told of each block that `evict` drops, while the cache still holds its pages; it may retain them,
        and then they become free when it lets go."""
        self._pages = pages
        self._on_evict = on_evict
        self._blocks: dict[bytes, _Block[PageKey]] = {}
        self._leaves: list[tuple[int, bytes]] = []  # heap of (used, hash); entries that are no longer true stay a while
        self._turn = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def hashes(self) -> list[bytes]:
        """Return the names of all blocks, parents before children."""
        return list(self._blocks)  # a parent is always inserted before its children

    @property
    def evictable_pages(self) -> int:
        """Pages that only the cache holds."""
        return self._pages.cached_alone

    def match(self, hashes: Sequence[bytes]) -> list[tuple[PageKey, ...]]:
        """Return the pages of the longest prefix of `hashes` that is cached, block by block, and mark it as used.

        The caller must hold them before anything is evicted.
        """
        found: list[bytes] = []
        for name in hashes:
            if name not in self._blocks:
                break
            found.append(name)
        self._touch(found)
        return [self._blocks[name].pages for name in found]

    def match_whole(self, hashes: Sequence[bytes]) -> tuple[PageKey, ...]:
        """Return the pages of all these blocks in token order; what `match` says holds here too.

        Raises:
            StaleMessageError: some block is not here any more.
        """
        found = self.match(hashes)
        if len(found) < len(hashes):
            raise StaleMessageError(f"{len(found)} of {len(hashes)} blocks are here")
        return tuple(page for block in found for page in block)

    def insert(self, name: bytes, pages: Sequence[PageKey], *, parent: bytes | None) -> bool:
        """Cache a block whose rows are all written; the cache becomes one more owner of `pages`.

        It counts as used when its parent was: `match` the whole chain first when that is long ago.

        Args:
            name: hash of the block.
            pages: its pages in token order, held by the caller.
            parent: hash of the block before it; None for the first block of a prompt.

        Returns:
            False, with nothing changed, when the block is cached already or its parent is not.
        """
        if name in self._blocks or (parent is not None and parent not in self._blocks):
            return False
        self._pages.cache(pages)
        if parent is None:
            self._turn += 1
            used = self._turn
        else:
            used = self._blocks[parent].used
            self._blocks[parent].num_children += 1
        self._blocks[name] = _Block(tuple(pages), parent, 0, used)
        self._queue(name)
        return True

    def evict(self, num_pages: int, useful: Callable[[PageKey], bool] = _any_page) -> list[bytes]:
        """Drop least recently used leaves until `num_pages` useful pages have no owner left, or no drop would free one.

        A leaf that would free nothing useful is spared as long as another leaf frees something.

        Args:
            num_pages: how many more must become free; those that `on_evict` retains are on their way to it.
            useful: which pages count; those of other allocators do not help one that is short.

        Returns:
            Hashes of the dropped blocks, children before parents.
        """
        dropped: list[bytes] = []
        pages: list[PageKey] = []
        freed = 0
        spared: list[tuple[int, bytes]] = []
        while freed < num_pages and (name := self._oldest_leaf(spared, useful)) is not None:
            freed += self._drop_up_from(name, num_pages - freed, useful, dropped, pages)
        for entry in spared:
            heapq.heappush(self._leaves, entry)
        self._pages.uncache(sorted(pages))  # all at once and in order: neighbours come back as one run
        return dropped

    def drop_all(self) -> list[bytes]:
        """Forget every block; return the hashes, children before parents."""
        names = self.hashes()[::-1]
        for block in self._blocks.values():
            self._pages.uncache(block.pages)
        self._blocks.clear()
        self._leaves.clear()
        return names

    def check(self) -> None:
        """Assert that every block is reachable, held, and a child of its parent."""
        children: dict[bytes, int] = {}
        for block in self._blocks.values():
            assert all(self._pages.refcount(page) > 0 for page in block.pages), "a cached page is free"
            if block.parent is not None:
                assert block.parent in self._blocks, "a block cannot be reached"
                assert self._blocks[block.parent].used >= block.used, "a child is younger than its parent"
                children[block.parent] = children.get(block.parent, 0) + 1
        queued = set(self._leaves)
        for name, block in self._blocks.items():
            assert block.num_children == children.get(name, 0), "children are miscounted"
            assert block.num_children or (block.used, name) in queued, "a leaf cannot be evicted"

    def _touch(self, chain: Sequence[bytes]) -> None:
        """Mark a chain, root first, as used now."""
        if not chain:
            return
        self._turn += 1
        for name in chain:
            self._blocks[name].used = self._turn
        self._queue(chain[-1])

    def _queue(self, name: bytes) -> None:
        block = self._blocks[name]
        if block.num_children:
            return
        if len(self._leaves) > 2 * len(self._blocks) + 64:
            self._leaves = [entry for entry in set(self._leaves) if self._is_true(entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (block.used, name))

    def _is_true(self, entry: tuple[int, bytes]) -> bool:
        block = self._blocks.get(entry[1])
        return block is not None and not block.num_children and block.used == entry[0]

    def _freeable(self, block: _Block[PageKey], useful: Callable[[PageKey], bool]) -> int:
        refcount, number = self._pages.refcount, 0
        for page in block.pages:
            if refcount(page) == 1 and useful(page):
                number += 1
        return number

    def _oldest_leaf(self, spared: list[tuple[int, bytes]], useful: Callable[[PageKey], bool]) -> bytes | None:
        """Take the leaf to drop next from the heap; add those passed over to `spared`."""
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if not self._is_true(entry):
                continue
            if self._freeable(self._blocks[entry[1]], useful):
                return entry[1]
            spared.append(entry)
        # No leaf that is left frees anything: one of them goes when blocks that would lie under it.
        for index, entry in enumerate(spared):
            if self._is_true(entry) and self._has_freeable_ancestor(entry[1], useful):
                del spared[index]
                return entry[1]
        return None

    def _has_freeable_ancestor(self, name: bytes, useful: Callable[[PageKey], bool]) -> bool:
        parent = self._blocks[name].parent
        while parent is not None:
            if self._freeable(self._blocks[parent], useful):
                return True
            parent = self._blocks[parent].parent
        return False

    def _drop_up_from(
        self,
        name: bytes,
        num_pages: int,
        useful: Callable[[PageKey], bool],
        dropped: list[bytes],
        pages: list[PageKey],
    ) -> int:
        """Drop a leaf, and then its ancestors as far as they are the next ones anyway; return the useful pages that
        become free with `pages`, to which theirs are added.

        A whole prompt leaves in one go, and not through the heap block by block.
        """
        freed = 0
        while True:
            block = self._blocks.pop(name)
            freed += self._freeable(block, useful)
            if self._on_evict is not None:
                self._on_evict(name, block.pages)
            pages += block.pages
            dropped.append(name)
            if block.parent is None:
                return freed
            parent = self._blocks[block.parent]
            parent.num_children -= 1
            is_next = not parent.num_children and parent.used == block.used and self._freeable(parent, useful)
            if not is_next or freed >= num_pages:
                self._queue(block.parent)
                return freed
            name = block.parent
