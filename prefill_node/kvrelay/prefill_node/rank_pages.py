"""Pages of all ranks of a ring by name, over one allocator per rank. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrelay.kvcache.allocator import PageAllocator, pages_of

RankPage = tuple[int, int]  # (rank, page of that rank's pool or host memory)


def by_rank(pages: Iterable[RankPage]) -> dict[int, list[int]]:
    """Return the pages of each rank, in the order given."""
    found: dict[int, list[int]] = {}
    for rank, page in pages:
        found.setdefault(rank, []).append(page)
    return found


class RankAllocators:
    """Who holds which page of which rank. Owned by the step thread of rank 0."""

    def __init__(self, pages_per_rank: Sequence[int]) -> None:
        self._allocators = tuple(PageAllocator(number) for number in pages_per_rank)

    def __len__(self) -> int:
        return len(self._allocators)

    def num_pages(self, rank: int) -> int:
        return self._allocators[rank].num_pages

    def free(self, rank: int) -> int:
        """Return the free pages of a rank."""
        return self._allocators[rank].free_pages

    def cached_alone_on(self, rank: int) -> int:
        """Return the pages of a rank that only the cache holds."""
        return self._allocators[rank].cached_alone

    @property
    def free_pages(self) -> int:
        return sum(allocator.free_pages for allocator in self._allocators)

    @property
    def total_pages(self) -> int:
        return sum(allocator.num_pages for allocator in self._allocators)

    @property
    def quarantined_pages(self) -> int:
        return sum(allocator.quarantined_pages for allocator in self._allocators)

    def allocate(self, ranks: Sequence[int]) -> tuple[RankPage, ...]:
        """Take a page of each of these ranks, in this order; those of one rank lie together as far as they can.

        Raises:
            CapacityError: a rank has fewer free pages than are wanted of it.
        """
        allocators = self._allocators
        if len(allocators) == 1:
            return tuple(zip(ranks, pages_of(allocators[0].allocate(len(ranks))), strict=True))
        fresh = {rank: iter(pages_of(allocators[rank].allocate(number))) for rank, number in Counter(ranks).items()}
        return tuple((rank, next(fresh[rank])) for rank in ranks)

    def retain(self, pages: Iterable[RankPage]) -> None:
        for rank, numbers in by_rank(pages).items():
            self._allocators[rank].retain(numbers)

    def release(self, pages: Iterable[RankPage]) -> None:
        """Drop one reference of each page."""
        for rank, numbers in by_rank(pages).items():
            self._allocators[rank].release(numbers)

    def quarantine(self, pages: Iterable[RankPage]) -> None:
        for rank, numbers in by_rank(pages).items():
            self._allocators[rank].quarantine(numbers)

    def unquarantine(self, pages: Iterable[RankPage]) -> None:
        for rank, numbers in by_rank(pages).items():
            self._allocators[rank].unquarantine(numbers)

    def check(self) -> None:
        """Assert the invariants."""
        for allocator in self._allocators:
            allocator.check()

    # What the prefix cache needs.
    @property
    def cached_alone(self) -> int:
        return sum(allocator.cached_alone for allocator in self._allocators)

    def cache(self, pages: Sequence[RankPage], /) -> None:
        for rank, numbers in by_rank(pages).items():
            self._allocators[rank].cache(numbers)

    def uncache(self, pages: Sequence[RankPage], /) -> None:
        for rank, numbers in by_rank(pages).items():
            self._allocators[rank].uncache(numbers)

    def refcount(self, page: RankPage, /) -> int:
        return self._allocators[page[0]].refcount(page[1])
