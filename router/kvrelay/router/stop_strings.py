"""Finding the first stop string in text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, holding back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Return the text that is certainly before any stop string; after a hit nothing comes any more."""
        if self.hit:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what is held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
