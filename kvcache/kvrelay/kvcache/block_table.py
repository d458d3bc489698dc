"""The pages of one sequence in token order. Pure; owned by one thread.

Position p of the sequence lives in page `pages[p // page_tokens]`, row `p % page_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Refcount = Callable[[int], int]


class BlockTable:
    """Maps positions to pages and rows. It owns nothing: its user retains and releases the pages."""

    def __init__(self, page_tokens: int, pages: Iterable[int] = ()) -> None:
        self.page_tokens = page_tokens
        self._pages = list(pages)

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages)

    @property
    def capacity_tokens(self) -> int:
        return len(self._pages) * self.page_tokens

    def append(self, pages: Iterable[int]) -> None:
        """Add pages behind the last one."""
        self._pages.extend(pages)

    def page_of(self, position: int) -> int:
        return self._pages[self._index(position)]

    def slot_of(self, position: int) -> int:
        """Return the row's number within a layer of the pool: page * page_tokens + row."""
        return self.page_of(position) * self.page_tokens + position % self.page_tokens

    def pages_for(self, num_tokens: int) -> tuple[int, ...]:
        """Return the pages that hold the first `num_tokens` tokens."""
        assert num_tokens <= self.capacity_tokens, f"{num_tokens} tokens in {self.capacity_tokens}"
        return tuple(self._pages[: -(-num_tokens // self.page_tokens)])

    def is_writable(self, position: int, refcount: Refcount) -> bool:
        """Tell whether nobody else holds the page of `position`."""
        return refcount(self.page_of(position)) == 1

    def writable(self, position: int, refcount: Refcount, new_page: Callable[[], int]) -> tuple[int, int] | None:
        """Make the page of `position` this sequence's own before a write (copy on write).

        Args:
            refcount: owners of a page.
            new_page: gives a fresh page, held once; called only when the page is shared.

        Returns:
            None when the page was its own already; else (old, new): the table now names `new`, and the caller copies
            the rows and then releases `old`.
        """
        if self.is_writable(position, refcount):
            return None
        index = self._index(position)
        old, new = self._pages[index], new_page()
        self._pages[index] = new
        return old, new

    def _index(self, position: int) -> int:
        assert 0 <= position < self.capacity_tokens, f"position {position} is outside {self.capacity_tokens}"
        return position // self.page_tokens
