"""Blocks on their way between the pool and host memory, on all ranks. Pure; owned by the step thread of rank 0.

Pages are held at both ends from the decision until every rank has said that its part is copied; only then does an
evicted page become free, and a loaded block cached. All decisions are rank 0's: the others copy what they are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.core.types import Counters
from kvrelay.prefill_node.host_tier import HostTier
from kvrelay.prefill_node.rank_pages import RankPage
from kvrelay.proto.v1 import ring_pb2

_MAX_PAGES = 64  # of one copy, so that what is at its front need not wait for all


class PoolPages(Protocol):
    """Who counts the owners of the pool's pages."""

    def retain(self, pages: Iterable[RankPage]) -> None: ...

    def release(self, pages: Iterable[RankPage]) -> None: ...

    def refcount(self, page: RankPage, /) -> int: ...


@dataclass(frozen=True, slots=True)
class HostChange:
    """Blocks that host memory has now, or will in a moment, and blocks that it has no more."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chain of blocks whose rows are all in the pool."""

    parent: bytes | None  # the block before the first one
    blocks: tuple[tuple[bytes, tuple[RankPage, ...]], ...]
    held: tuple[RankPage, ...]  # to be released: their pages, and those before them


@dataclass(slots=True)
class _Copy:
    to_host: bool
    names: list[bytes] = field(default_factory=list)
    pool: list[RankPage] = field(default_factory=list)
    host: list[RankPage] = field(default_factory=list)
    undone: set[int] = field(default_factory=set)  # ranks that have not reported
    load: _Load | None = None

    def add(self, name: bytes, pool: Sequence[RankPage], host: Sequence[RankPage]) -> None:
        self.names.append(name)
        self.pool += pool
        self.host += host
        self.undone |= {rank for rank, _ in pool}


@dataclass(slots=True)
class _Load:
    what: Loaded
    copies: int  # that are not done


class HostCopies:
    """Everything in between; the tier is its own."""

    def __init__(self, tier: HostTier, pages: PoolPages, *, page_bytes: int) -> None:
        """
        Args:
            page_bytes: of one page in all layers.
        """
        self._tier = tier
        self._pages = pages
        self._page_bytes = page_bytes
        self._copies: dict[int, _Copy] = {}
        self._unsent: list[_Copy] = []
        self._moving: set[bytes] = set()
        self._last_id = 0
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.counters = Counters()
        self._note()

    @property
    def num_moving(self) -> int:
        """Blocks on their way, in either direction."""
        return len(self._moving)

    @property
    def has_unsent(self) -> bool:
        """The ranks have to be told something."""
        return bool(self._unsent)

    def is_moving(self, name: bytes) -> bool:
        return name in self._moving

    def leaving(self, rank: int | None = None) -> int:
        """Return how many pages of the pool (on one rank, or on all) become free when what leaves is copied."""
        return sum(
            self._pages.refcount(page) == 1 and rank in (None, page[0])
            for copy in (*self._copies.values(), *self._unsent)
            if copy.to_host
            for page in copy.pool
        )

    def evicted(self, name: bytes, pages: tuple[RankPage, ...]) -> None:
        """Keep a block that leaves the prefix cache, if there is room; holds its pages until it is copied."""
        if name in self._tier:
            self._tier.touch(name)
            return
        host, gone = self._tier.put(name, [rank for rank, _ in pages])
        self._gone(gone)
        if host is None:
            self.counters.add("host_refused_total")
            return
        self._pages.retain(pages)
        self._removed.pop(name, None)
        self._added[name] = None
        last = self._unsent[-1] if self._unsent else None
        if last is None or not last.to_host or len(last.pool) >= _MAX_PAGES:
            last = _Copy(to_host=True)
            self._unsent.append(last)
        last.add(name, pages, host)
        self._moving.add(name)
        self.counters.add("host_saved_total")
        self._note()

    def found(self, names: Sequence[bytes]) -> list[tuple[RankPage, ...]]:
        """Return the pages in host memory of the leading blocks that are there as a whole, and mark them as used."""
        return self._tier.match(names)

    def hit(self) -> None:
        """Count a prompt that found blocks in host memory, whether they are then loaded or not."""
        self.counters.add("host_hits_total")

    def pin(self, names: Sequence[bytes]) -> None:
        self._tier.pin(names)

    def unpin(self, names: Sequence[bytes]) -> None:
        self._tier.unpin(names)

    def load(self, what: Loaded) -> None:
        """Begin to copy pinned blocks into pages of the pool that are held, each page on its own rank."""
        load = _Load(what, 0)
        names = [name for name, _ in what.blocks]
        copy: _Copy | None = None
        for (name, pool), host in zip(what.blocks, self._tier.match(names), strict=True):
            if copy is None or len(copy.pool) >= _MAX_PAGES:
                copy = _Copy(to_host=False, load=load)
                self._unsent.append(copy)
                load.copies += 1
            copy.add(name, pool, host)
        self._moving.update(names)
        self.counters.add("host_loads_total")
        self.counters.add("host_loaded_blocks_total", len(names))

    def messages(self) -> list[ring_pb2.HostCopy]:
        """Return what the ranks have to copy and were not told yet."""
        found = []
        for copy in self._unsent:
            self._last_id += 1
            self._copies[self._last_id] = copy
            message = ring_pb2.HostCopy(copy_id=self._last_id, to_host=copy.to_host)
            for rank in sorted(copy.undone):
                pairs = [both for both in zip(copy.pool, copy.host, strict=True) if both[0][0] == rank]
                message.parts.add(
                    rank=rank, pool_pages=[pool for (_, pool), _ in pairs], host_pages=[host for _, (_, host) in pairs]
                )
            found.append(message)
        self._unsent.clear()
        return found

    def copied(self, rank: int, copy_ids: Iterable[int]) -> tuple[bool, list[Loaded]]:
        """Take in which copies a rank has done.

        Returns:
            (pages may have become free, chains that are loaded: the caller caches them and releases what they hold).
        """
        any_done = False
        loaded: list[Loaded] = []
        for copy_id in copy_ids:
            copy = self._copies[copy_id]
            copy.undone.discard(rank)
            if copy.undone:
                continue
            any_done = True
            del self._copies[copy_id]
            if copy.load is None:
                self._saved(copy)
                continue
            copy.load.copies -= 1
            if not copy.load.copies:
                names = [name for name, _ in copy.load.what.blocks]
                self._moving.difference_update(names)
                self._tier.unpin(names)
                loaded.append(copy.load.what)
        return any_done, loaded

    def take_change(self) -> HostChange:
        """Return how the tier has changed since the last call."""
        change = HostChange(tuple(self._added), tuple(self._removed))
        self._added.clear()
        self._removed.clear()
        return change

    def check(self) -> None:
        """Assert the invariants of the tier, and that what moves is held."""
        self._tier.check()
        for copy in (*self._copies.values(), *self._unsent):
            assert all(self._pages.refcount(page) > 0 for page in copy.pool), "a page that is copied is free"
            assert all(name in self._tier for name in copy.names), "a block that is copied has gone"

    def _saved(self, copy: _Copy) -> None:
        for name in copy.names:
            self._tier.arrived(name)
        self._moving.difference_update(copy.names)
        self._pages.release(copy.pool)

    def _gone(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._added.pop(name, None)
            self._removed[name] = None
        if names:
            self.counters.add("host_evicted_total", len(names))

    def _note(self) -> None:
        self.counters.values["host_blocks"] = float(len(self._tier))
        self.counters.values["host_bytes"] = float(self._tier.used_pages * self._page_bytes)
