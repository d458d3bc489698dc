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


def allocate(allocators: Sequence[PageAllocator], ranks: Sequence[int]) -> tuple[RankPage, ...]:
    """Take a page of each of these ranks, in this order; those of one rank lie together as far as they can.

    Raises:
        CapacityError: a rank has fewer free pages than are wanted of it.
    """
    if len(allocators) == 1:
        return tuple(zip(ranks, pages_of(allocators[0].allocate(len(ranks))), strict=True))
    fresh = {rank: iter(pages_of(allocators[rank].allocate(number))) for rank, number in Counter(ranks).items()}
    return tuple((rank, next(fresh[rank])) for rank in ranks)
