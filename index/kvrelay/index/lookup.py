"""The prefix index as a router asks it: its mirror while that is exact, the server, then the mirror as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrelay.index.mirror import KEEP_S, IndexMirror
from kvrelay.index.reader import Confidence, Match, PrefixReader


class Lookup(Protocol):
    """Answers who holds how much of a prompt."""

    async def longest(self, hashes: Sequence[bytes]) -> Match: ...


class PrefixIndex:
    """Answers locally when it can. Never raises."""

    def __init__(self, mirror: IndexMirror, reader: PrefixReader) -> None:
        self.mirror = mirror
        self._reader = reader

    async def start(self) -> None:
        await self.mirror.start()

    async def stop(self) -> None:
        await self.mirror.stop()
        await self._reader.close()

    async def longest(self, hashes: Sequence[bytes]) -> Match:
        """Return how many leading blocks of `hashes` each holder has.

        EXACT from the mirror; when that is in doubt, what the server says; when the server does not answer, what the
        mirror knew less than KEEP_S ago, as DEGRADED; without even that FALLBACK.
        """
        if self.mirror.is_exact:
            return Match(self.mirror.longest(hashes), Confidence.EXACT)
        answer = await self._reader.longest(hashes)
        if answer.confidence is Confidence.FALLBACK and self.mirror.silent_s < KEEP_S:
            return Match(self.mirror.longest(hashes), Confidence.DEGRADED)
        return answer
