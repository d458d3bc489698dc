"""What this router has placed and not seen end: load that no heartbeat tells yet, and blocks that are on their way."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.types import Incarnation
from kvrelay.router.placement import Load, Pair

RECENT_S = 3600.0  # work given to a node fades from what counts as its share with this time constant
_MAX_REMEMBERED = 4096  # nodes whose recent work is remembered while they have nothing


@dataclass(slots=True)
class _Account:
    """One node."""

    requests: int = 0
    tokens: int = 0
    pages: int = 0
    at_work: dict[int, Entry] = field(default_factory=dict)  # entries whose prompt is not computed, by identity
    blocks: Counter[bytes] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Share:
    """What one request has on one node."""

    node: Incarnation
    tokens: int = 0
    pages: int = 0
    work_s: float = 0.0


@dataclass(slots=True, eq=False)
class Entry:
    """One placed request. Created by `Books.enter`."""

    books: Books
    shares: tuple[Share, ...]  # prefill first
    hashes: Sequence[bytes]
    entered_s: float = 0.0
    is_alone: bool = True  # nothing else was computed on its prefill node as long as it was
    is_computed: bool = False
    is_released: bool = False
    on_computed: Callable[[], None] = lambda: None

    def computed(self) -> None:
        """The prompt is computed and no work ahead any more."""
        if not self.is_computed and not self.is_released:
            self.is_computed = True
            self.on_computed()
            for share in self.shares:
                account = self.books.accounts[share.node]
                account.tokens -= share.tokens
                account.at_work.pop(id(self), None)

    def release(self) -> None:
        """The request has ended; the second time nothing happens."""
        if not self.is_released:
            self.computed()
            self.is_released = True
            self.books.remove(self)


class Books:
    """All placed requests. Memory is bounded by what is in work: an entry goes with its request."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self.accounts: dict[Incarnation, _Account] = {}
        self._recent: dict[Incarnation, tuple[float, float]] = {}  # node -> (work in seconds, as of when)
        self._clock = clock

    def enter(
        self,
        pair: Pair,
        *,
        decode_pages: int,
        hashes: Sequence[bytes],
        on_computed: Callable[[], None] = lambda: None,
    ) -> Entry:
        """Enter a request; `on_computed` is called once, at the latest when it is released."""
        node = pair.prefill.incarnation
        shares = [Share(node, tokens=pair.remaining_tokens, work_s=pair.work_s)]
        if pair.decode is not None:
            shares.append(Share(pair.decode.incarnation, pages=decode_pages))
        for share in shares:
            account = self.accounts.setdefault(share.node, _Account())
            account.requests += 1
            account.tokens += share.tokens
            account.pages += share.pages
            account.blocks.update(hashes)
        self._recent[node] = self._recent_s(node) + pair.work_s, self._clock()
        if len(self._recent) > _MAX_REMEMBERED:
            del self._recent[min(self._recent, key=lambda one: self._recent[one][1])]
        entry = Entry(self, tuple(shares), hashes, self._clock(), on_computed=on_computed)
        at_work = self.accounts[node].at_work
        for other in at_work.values():
            other.is_alone = entry.is_alone = False
        at_work[id(entry)] = entry
        return entry

    @property
    def num_waiting(self) -> int:
        """Requests whose prompt is not computed yet."""
        return sum(len(account.at_work) for account in self.accounts.values())

    def loads(self) -> Mapping[Incarnation, Load]:
        """Return the load of every node that has any, now or lately."""
        loads = {
            node: Load(
                one.requests,
                one.tokens,
                one.pages,
                tuple(entry.shares[0].work_s for entry in one.at_work.values()),
                self._recent_s(node),
            )
            for node, one in self.accounts.items()
        }
        for node in self._recent.keys() - loads.keys():
            loads[node] = Load(recent_s=self._recent_s(node))
        return loads

    def tentative_blocks(self, hashes: Sequence[bytes]) -> dict[Incarnation, int]:
        """Return how many leading blocks of a prompt each node has or will have by the requests placed on it.

        A block's hash stands for all blocks before it, and requests are entered with all of theirs: what is missing is
        missing from some block on, so halving finds it.
        """
        found = {}
        for node, account in self.accounts.items():
            blocks = account.blocks
            if count := bisect_left(hashes, True, key=lambda one, blocks=blocks: one not in blocks):  # type: ignore[misc]
                found[node] = count
        return found

    def remove(self, entry: Entry) -> None:
        """For `Entry.release`."""
        for share in entry.shares:
            account = self.accounts[share.node]
            account.requests -= 1
            account.pages -= share.pages
            blocks = account.blocks
            for one in entry.hashes:
                if blocks[one] > 1:
                    blocks[one] -= 1
                else:
                    del blocks[one]
            if not account.requests:
                del self.accounts[share.node]

    def _recent_s(self, node: Incarnation) -> float:
        work_s, as_of_s = self._recent.get(node, (0.0, 0.0))
        return work_s * math.exp((as_of_s - self._clock()) / RECENT_S) if work_s else 0.0
