"""The seam to the prefix index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Publisher(Protocol):
    """Who tells the prefix index which blocks are here. Never waits."""

    def publish(self, hashes: Sequence[bytes], /) -> None: ...

    def retract(self, hashes: Sequence[bytes], /) -> None: ...
