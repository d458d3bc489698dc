"""Scattered rows gathered into staging before they leave, where that makes few large pieces of many small ones.

A descriptor costs about 5 us to post and one page of 73,728 bytes goes at a thirtieth of the speed of a large piece,
while gathering runs at the speed of memory. Only the writer's side is packed: decode hands out long runs of pages, and
what one-sided writes reach obeys one rule, that of pages; see docs/handoff.md.

Staging is read by our own writes alone. A slot is taken again only when the write that reads it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.kv_transfer.plan import Copies, Copy, CopyTable, firsts_of_merged, table_of

# Starts copying the sources of copies, in order, to an offset of the same memory; the returned call says if it is done.
Gather = Callable[[CopyTable, int], Callable[[], bool]]
_FEWEST_COPIES = 4  # fewer are posted as fast as one is gathered
_LARGE_BYTES = 2 << 20  # pieces of this size go at the speed of the link
_ALIGN_BYTES = 256


def is_scattered(num_copies: int, num_bytes: int) -> bool:
    """Return whether copies are many and small: one by one they would go far below the speed of a link."""
    return num_copies >= _FEWEST_COPIES and num_bytes < _LARGE_BYTES * num_copies


class Packed(Protocol):
    """A part whose rows are being gathered."""

    @property
    def copies(self) -> Copies:
        """Where they go from staging."""
        ...

    def ready(self) -> bool:
        """The rows are in staging: the copies may be posted."""
        ...

    def release(self) -> None:
        """Give the staging back; once, when no write reads it any more."""
        ...


class Packer:
    """The staging of one process. Not locked: the transfer thread owns it."""

    def __init__(self, gather: Gather, *, offset_bytes: int, num_bytes: int) -> None:
        """Use [offset_bytes, offset_bytes + num_bytes) of the registered memory, in which `gather` copies.

        Gathers that were started one after the other must write in that order, so that a slot whose part was given up
        can be taken again at once.
        """
        self._gather = gather
        self._slots = Slots(offset_bytes, num_bytes)

    def gains(self, copies: Sequence[Copy]) -> bool:
        """Return whether gathered rows would leave in at most half as many pieces."""
        if len(copies) < _FEWEST_COPIES:
            return False
        table = table_of(copies)
        return int(table[:, 2].sum()) <= self._slots.num_bytes and 2 * len(_firsts(table)) <= len(table)

    def start(self, copies: Sequence[Copy]) -> Packed | None:
        """Begin to gather the rows; None when there is no room until others' writes have ended."""
        table = table_of(copies)
        offset = self._slots.take(int(table[:, 2].sum()))
        if offset is None:
            return None
        return _Packed(_gathered(table, offset), self._gather(table, offset), lambda: self._slots.give_back(offset))


@dataclass(frozen=True, slots=True)
class _Packed:
    copies: Copies
    is_ready: Callable[[], bool]
    give_back: Callable[[], None]

    def ready(self) -> bool:
        return self.is_ready()

    def release(self) -> None:
        self.give_back()


class Slots:
    """Which bytes of a range are taken. Few are at a time, so a list is walked."""

    def __init__(self, offset_bytes: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._begin, self._end = offset_bytes, offset_bytes + num_bytes
        self._taken: list[tuple[int, int]] = []  # (offset, end), sorted

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of the first gap that is large enough, or None."""
        place = self._begin
        for index, (offset, end) in enumerate([*self._taken, (self._end, self._end)]):
            if place + num_bytes <= offset:
                self._taken.insert(index, (place, place + num_bytes))
                return place
            place = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        return None

    def give_back(self, offset_bytes: int) -> None:
        [index] = [index for index, (offset, _) in enumerate(self._taken) if offset == offset_bytes]
        del self._taken[index]


def _firsts(table: CopyTable) -> npt.NDArray[np.intp]:
    """Return the numbers of the copies whose targets do not continue those before."""
    return firsts_of_merged(table[:-1, 1] + table[:-1, 2] == table[1:, 1])


def _gathered(table: CopyTable, offset_bytes: int) -> Copies:
    """Return the copies of the same rows once they lie at an offset one behind the other; neighbours are merged."""
    firsts, sizes = _firsts(table), table[:, 2]
    sources = offset_bytes + np.cumsum(sizes) - sizes
    return Copies(np.stack((sources[firsts], table[firsts, 1], np.add.reduceat(sizes, firsts)), axis=1))
