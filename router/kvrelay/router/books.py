"""What this router has placed and not seen end: load that no heartbeat tells yet, and blocks that are on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.types import Incarnation
from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.placement import Pair
from kvrelay.router.tentative import TentativeBlocks

_MAX_REMEMBERED = 4096  # nodes; beyond that, those that have nothing are forgotten ...
_LEAST_REMEMBERED = 3072  # ... until so many are left: going through all of them is not for each request


@dataclass(slots=True)
class _Account:
    """One node."""

    requests: int = 0
    at_work: dict[int, Entry] = field(default_factory=dict)  # entries whose prompt is not computed, by identity


@dataclass(frozen=True, slots=True)
class Share:
    """What one request has on one node."""

    node: Incarnation
    tokens: int = 0
    pages: int = 0
    work_s: float = 0.0
    context: int = 0  # tokens, in the steps of a decode node


@dataclass(slots=True, eq=False)
class Entry:
    """One placed request. Created by `Books.enter`."""

    books: Books
    shares: tuple[Share, ...]  # where the prompt is computed first
    hashes: Sequence[bytes]
    entered_s: float = 0.0
    held_by: list[Incarnation] = field(default_factory=list)  # where its blocks are on their way, or are
    work: int = 0  # see `LoadColumns.put`
    fetch: tuple[Incarnation, int] | None = None  # from where, see `LoadColumns.put_fetch`; None when over
    key: int = 0  # for its owner
    is_alone: bool = True  # nothing else was computed on its prefill node as long as it was
    is_computed: bool = False
    is_released: bool = False
    on_computed: Callable[[], None] = lambda: None

    def fetched(self) -> None:
        """What was to be fetched has come, or will not."""
        if self.fetch is not None:
            self.books.fetched(*self.fetch)
            self.fetch = None

    def computed(self) -> None:
        """The prompt is computed and no work ahead any more; from here on decode has it too."""
        self._computed(landed=True)

    def _computed(self, *, landed: bool) -> None:
        if not self.is_computed and not self.is_released:
            self.is_computed = True
            self.on_computed()
            self.books.computed(self, landed=landed)

    def release(self) -> None:
        """The request has ended; the second time nothing happens."""
        if not self.is_released:
            self._computed(landed=False)
            self.is_released = True
            self.books.remove(self)


class Books:
    """All placed requests. Memory is bounded by what is in work: an entry goes with its request."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.accounts: dict[Incarnation, _Account] = {}
        self._columns = LoadColumns()
        self._blocks = TentativeBlocks()
        self._clock = clock

    def enter(
        self,
        pair: Pair,
        *,
        decode_pages: int,
        hashes: Sequence[bytes],
        context: int = 0,
        on_computed: Callable[[], None] = lambda: None,
    ) -> Entry:
        """Enter a request; `on_computed` is called once, at the latest when it is released.

        Args:
            context: tokens that decode steps will have of it.
        """
        shares = [Share(pair.prefill.incarnation, tokens=pair.remaining_tokens, work_s=pair.work_s)]
        if pair.decode is not None and pair.local is not None:
            shares = [replace(shares[0], node=pair.decode.incarnation, pages=decode_pages, context=context)]
        elif pair.decode is not None:
            shares.append(Share(pair.decode.incarnation, pages=decode_pages, context=context))
        entry = Entry(self, tuple(shares), hashes, self._clock(), on_computed=on_computed)
        self._put(entry)
        self._columns.count_turn(share.node for share in shares)
        if pair.pull is not None:
            source = pair.pull.source.incarnation
            entry.fetch = source, self._columns.put_fetch(source, pair.pull.tokens)
        if self._columns.num_nodes > _MAX_REMEMBERED:
            self._columns.forget_idle(keep=_LEAST_REMEMBERED)
        return entry

    def replan(self, entry: Entry, shares: tuple[Share, ...]) -> None:
        """Note that the prompt of a request is computed in another way than was planned, or elsewhere."""
        if entry.is_computed or entry.is_released:
            return
        self._end_work(entry)
        self._drop(entry)
        entry.shares = shares
        self._put(entry)
        entry.is_alone = False  # its time would say little

    def _put(self, entry: Entry) -> None:
        for share in entry.shares:
            self.accounts.setdefault(share.node, _Account()).requests += 1
            self._columns.add(share.node, requests=1, tokens=share.tokens, pages=share.pages, context=share.context)
        first = entry.shares[0]
        self._hold(entry, first.node)
        self.loads().worked(first.node, first.work_s)
        entry.work = self._columns.put(first.node, first.work_s)
        at_work = self.accounts[first.node].at_work
        if at_work:
            entry.is_alone = False
            next(iter(at_work.values())).is_alone = False  # where there are several, none was
        at_work[id(entry)] = entry

    def _hold(self, entry: Entry, node: Incarnation) -> None:
        self._blocks.add(self._columns.slot(node), entry.hashes)
        entry.held_by.append(node)

    def _end_work(self, entry: Entry) -> None:
        entry.fetched()
        for share in entry.shares:
            self._columns.add(share.node, tokens=-share.tokens)
        del self.accounts[entry.shares[0].node].at_work[id(entry)]
        self._columns.take(entry.work)

    def _drop(self, entry: Entry) -> None:
        for node in entry.held_by:
            self._blocks.remove(self._columns.slot(node), entry.hashes)
        entry.held_by.clear()
        for share in entry.shares:
            self._columns.add(share.node, requests=-1, pages=-share.pages, context=-share.context)
            account = self.accounts[share.node]
            account.requests -= 1
            if not account.requests:
                del self.accounts[share.node]

    @property
    def num_waiting(self) -> int:
        """Requests whose prompt is not computed yet."""
        return sum(len(account.at_work) for account in self.accounts.values())

    def loads(self) -> LoadColumns:
        """Return the load of every node that has any, now or lately; it goes on to show what changes later."""
        self._columns.at(self._clock())
        return self._columns

    def tentative_blocks(self, hashes: Sequence[bytes]) -> list[tuple[Incarnation, int]]:
        """Return how many leading blocks of a prompt each node has or will have by the requests placed on it.

        Where a prompt is computed, those that follow wait for its blocks. Its decode node has them once it is.
        """
        node = self._columns.node
        return [(node(slot), count) for slot, count in self._blocks.longest(hashes).items()]

    def fetched(self, source: Incarnation, at: int) -> None:
        """For `Entry.fetched`."""
        self._columns.take_fetch(source, at)

    def computed(self, entry: Entry, *, landed: bool) -> None:
        """For `Entry.computed`."""
        self._end_work(entry)
        for share in entry.shares[1:] if landed else ():
            self._hold(entry, share.node)

    def remove(self, entry: Entry) -> None:
        """For `Entry.release`."""
        self._drop(entry)
