"""What this router has placed and not seen end: load that no heartbeat tells yet, and blocks that are on their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.core.types import Incarnation
from kvrelay.router.placement import Load, Pair


@dataclass(slots=True)
class _Account:
    """One node."""

    requests: int = 0
    tokens: int = 0
    pages: int = 0
    blocks: Counter[bytes] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Entry:
    """One placed request. Created by `Books.enter`."""

    books: Books
    parts: tuple[tuple[Incarnation, int, int], ...]  # node, prompt tokens to compute, pages
    hashes: Sequence[bytes]
    is_computed: bool = False
    is_released: bool = False

    def computed(self) -> None:
        """The prompt is computed and no work ahead any more."""
        if not self.is_computed and not self.is_released:
            self.is_computed = True
            for node, tokens, _ in self.parts:
                self.books.accounts[node].tokens -= tokens

    def release(self) -> None:
        """The request has ended; the second time nothing happens."""
        if not self.is_released:
            self.computed()
            self.is_released = True
            self.books.remove(self)


class Books:
    """All placed requests. Memory is bounded by what is in work: an entry goes with its request."""

    def __init__(self) -> None:
        self.accounts: dict[Incarnation, _Account] = {}

    def enter(self, pair: Pair, *, decode_pages: int, hashes: Sequence[bytes]) -> Entry:
        parts = [(pair.prefill.incarnation, pair.remaining_tokens, 0)]
        if pair.decode is not None:
            parts.append((pair.decode.incarnation, 0, decode_pages))
        for node, tokens, pages in parts:
            account = self.accounts.setdefault(node, _Account())
            account.requests += 1
            account.tokens += tokens
            account.pages += pages
            account.blocks.update(hashes)
        return Entry(self, tuple(parts), hashes)

    def loads(self) -> Mapping[Incarnation, Load]:
        return {node: Load(one.requests, one.tokens, one.pages) for node, one in self.accounts.items()}

    def tentative_blocks(self, hashes: Sequence[bytes]) -> dict[Incarnation, int]:
        """Return how many leading blocks of a prompt each node has or will have by the requests placed on it."""
        found = {}
        for node, account in self.accounts.items():
            missing = (at for at, one in enumerate(hashes) if one not in account.blocks)
            if count := next(missing, len(hashes)):
                found[node] = count
        return found

    def remove(self, entry: Entry) -> None:
        """For `Entry.release`."""
        for node, _, pages in entry.parts:
            account = self.accounts[node]
            account.requests -= 1
            account.pages -= pages
            for one in entry.hashes:
                account.blocks[one] -= 1
                if not account.blocks[one]:
                    del account.blocks[one]
            if not account.requests:
                del self.accounts[node]
