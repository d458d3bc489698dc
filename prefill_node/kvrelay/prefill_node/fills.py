"""Pages that another node fills: blocks of a prompt that it has and this node lacks. Pure; owned by the step thread.

From `begin` to `end` a fill holds its pages, whatever becomes of it: the other node may write into them until it has
proven that it does not. What it fills counts as being computed: others wait for it, and take over when it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.shard import Span
from kvrelay.prefill_node.pages import RequestPages, RingPages


@dataclass(frozen=True, slots=True)
class Fill:
    """Where the blocks go, for the thread that has them fetched. Of a ring of one rank."""

    pages: tuple[int, ...]  # in token order
    cached_tokens: int  # of the first blocks, which are here already


@dataclass(slots=True)
class _Record:
    hashes: tuple[bytes, ...]
    pages: RequestPages
    under_way: bool = True  # neither complete nor given up
    quarantined: bool = False


class Fills:
    def __init__(self, pages: RingPages, *, block_tokens: int, computing: dict[bytes, str]) -> None:
        """`computing`: block -> who computes it; of the owner, entered here too."""
        self._pages = pages
        self._block_tokens = block_tokens
        self._computing = computing
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_under_way(self) -> int:
        """Return how many requests wait for theirs."""
        return sum(record.under_way for record in self._records.values())

    def begin(self, key: str, hashes: Sequence[bytes]) -> tuple[Fill | None, list[bytes]]:
        """Take pages for blocks of a prompt.

        Returns:
            (fill, hashes of evicted blocks). The fill is None when all blocks are here, when the first one that is
            missing is being computed, or when there is no room.
        """
        assert key not in self._records, f"{key} has begun already"
        cached = self._pages.cached_blocks(hashes)
        if cached == len(hashes) or hashes[cached] in self._computing:
            return None, []
        pages, evicted = self._pages.take(hashes, len(hashes) * self._block_tokens)
        if pages is None:
            return None, evicted
        self._records[key] = _Record(tuple(hashes), pages)
        for block in hashes[cached:]:
            self._computing.setdefault(block, key)
        return Fill(tuple(page for _, page in pages.pages), pages.cached_tokens), evicted

    def complete(self, key: str) -> list[bytes]:
        """Cache the blocks, whose rows are all there and right; return the hashes that are new."""
        self.give_up(key)
        record = self._records[key]
        blocks = Span(record.pages.cached_tokens // self._block_tokens, len(record.hashes))
        return self._pages.commit(record.hashes, record.pages, blocks)

    def give_up(self, key: str) -> None:
        """Nobody fills the blocks any more: whoever waits for them may compute them."""
        record = self._records.get(key)
        if record is None:
            return
        record.under_way = False
        for block in record.hashes:
            if self._computing.get(block) == key:
                del self._computing[block]

    def quarantine(self, key: str) -> None:
        """The other node's end is not proven in time: the pages that it may write are lost until it is."""
        record = self._records[key]
        record.quarantined = True
        self._pages.quarantine(self._writable(record))

    def end(self, key: str) -> None:
        """The other node can write no more: let go of the pages; those of cached blocks stay with the cache.

        A fill that has not begun is ignored.
        """
        self.give_up(key)
        record = self._records.pop(key, None)
        if record is None:  # it has never begun
            return
        if record.quarantined:
            self._pages.unquarantine(self._writable(record))
        self._pages.release(record.pages.pages)

    def _writable(self, record: _Record) -> tuple[tuple[int, int], ...]:
        return record.pages.pages[record.pages.cached_tokens // self._pages.page_tokens :]
