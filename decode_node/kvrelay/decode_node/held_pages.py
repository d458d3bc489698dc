"""Pages of every epoch from Reserve until no writer can reach them. Pure; owned by the event loop.

They outlive their request: a request that has ended may still have a writer that must be fenced first.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.layout import PageLayout
from kvrelay.decode_node.admission import Grant, PageBook


@dataclass(slots=True)
class _Epoch:
    pages: tuple[int, ...]  # still held
    prompt: tuple[int, ...]  # what the hand-off will give back
    writable: tuple[int, ...]  # of these, those that the writer may write
    quarantined: bool = False


class HeldPages:
    """What each epoch holds, by its counter."""

    def __init__(self, book: PageBook, layout: PageLayout) -> None:
        self._book = book
        self._layout = layout
        self._epochs: dict[int, _Epoch] = {}

    def hold(self, key: int, grant: Grant, *, prompt_tokens: int) -> None:
        prompt = grant.pages[: self._layout.pages_for(prompt_tokens)]
        writable = prompt[grant.resident_tokens // self._layout.page_tokens :]
        self._epochs[key] = _Epoch(grant.pages, prompt, writable)

    def quarantine(self, key: int) -> None:
        """A writer's end is not proven in time: the pages that it was allowed to write are lost until it is.

        No step uses the epoch's pages by then, so those that no writer can reach (the output's, and the resident ones)
        come back now.
        """
        epoch = self._epochs[key]
        epoch.quarantined = True
        self._book.quarantine(epoch.writable)
        lost = frozenset(epoch.writable)
        self._book.release(page for page in epoch.pages if page not in lost)
        epoch.pages = epoch.writable

    def free(self, key: int, prompt_pages: tuple[int, ...]) -> None:
        """No writer can reach the epoch's pages any more, and no step uses them."""
        epoch = self._epochs.pop(key)
        assert prompt_pages == epoch.prompt, f"epoch {key} gives back pages that are not its own"
        if epoch.quarantined:
            self._book.unquarantine(epoch.writable)
        self._book.release(epoch.pages)

    @property
    def waits_for_writers(self) -> bool:
        """Some epoch's pages will come back, or be quarantined, in bounded time."""
        return not all(epoch.quarantined for epoch in self._epochs.values())
