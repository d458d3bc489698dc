"""Which blocks lie in host memory, on which pages of it, and which go when room is wanted. Pure; owned by one thread.

The tier has an account of pages of its own, one per rank: what of a block lay on a rank of the ring stays on that rank.
A block's name covers layout, tenant and all tokens before it (`kvrelay.core.prefix_hash`), so a name is all it takes to
find the right rows. A block may be here and in the pool at once: what was loaded need not be copied again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.prefill_node.rank_pages import RankAllocators, RankPage


@dataclass(slots=True)
class _Block:
    pages: tuple[RankPage, ...]  # in token order
    is_arriving: bool = True  # its rows are not all here yet
    readers: int = 0  # copies that read it


class HostTier:
    """Blocks by name, least recently used first out; a block that is being copied either way stays."""

    def __init__(self, pages_per_rank: Sequence[int]) -> None:
        self._held = RankAllocators(pages_per_rank)
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    @property
    def used_pages(self) -> int:
        """Pages of all ranks that hold something."""
        return self._held.total_pages - self._held.free_pages

    def put(self, name: bytes, ranks: Sequence[int]) -> tuple[tuple[RankPage, ...] | None, list[bytes]]:
        """Take pages for a block that is not here; it counts from `arrived` on.

        Args:
            ranks: of its pages, in token order.

        Returns:
            (its pages, names of the blocks that went for it). Pages are None, and nothing went, when there is no room
            that is not being copied to or from.
        """
        assert name not in self._blocks, "a block is put once"
        going = self._to_go(Counter(ranks))
        if going is None:
            return None, []
        for one in going:
            self._held.release(self._blocks.pop(one).pages)
        pages = self._held.allocate(ranks)
        self._blocks[name] = _Block(pages)
        return pages, going

    def arrived(self, name: bytes) -> None:
        """The rows of a block are all here."""
        self._blocks[name].is_arriving = False

    def touch(self, name: bytes) -> None:
        """Mark a block as used now."""
        self._blocks.move_to_end(name)

    def match(self, names: Sequence[bytes]) -> list[tuple[RankPage, ...]]:
        """Return the pages of the leading blocks that are here, and mark these as used, the first one last: what comes
        behind a block is of no use without it. Pin them before anything is put."""
        found: list[bytes] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None or block.is_arriving:
                break
            found.append(name)
        for name in reversed(found):
            self._blocks.move_to_end(name)
        return [self._blocks[name].pages for name in found]

    def pin(self, names: Iterable[bytes]) -> None:
        """Keep blocks that are read."""
        for name in names:
            self._blocks[name].readers += 1

    def unpin(self, names: Iterable[bytes]) -> None:
        for name in names:
            assert self._blocks[name].readers > 0, "a block nobody reads"
            self._blocks[name].readers -= 1

    def check(self) -> None:
        """Assert that every page is free or of exactly one block."""
        held = [page for block in self._blocks.values() for page in block.pages]
        assert len(held) == len(set(held)), "a page is of two blocks"
        self._held.check()
        assert all(self._held.refcount(page) == 1 for page in held), "a page of a block is free"
        assert self._held.free_pages + len(held) == self._held.total_pages, "a page is lost"

    def _to_go(self, wanted: Counter[int]) -> list[bytes] | None:
        """Return the blocks to drop so that each rank has room, oldest first; None when that cannot be."""
        missing = {rank: number - self._held.free(rank) for rank, number in wanted.items()}
        going: list[bytes] = []
        for name, block in self._blocks.items():
            if all(number <= 0 for number in missing.values()):
                break
            if block.is_arriving or block.readers or not any(missing.get(rank, 0) > 0 for rank, _ in block.pages):
                continue
            going.append(name)
            for rank, _ in block.pages:
                missing[rank] = missing.get(rank, 0) - 1
        return going if all(number <= 0 for number in missing.values()) else None
