"""A copy of the prefix index in memory: which holder has which block, and how sure that is. Pure.

It is fed with changes, which each holder numbers from 1, and with snapshots. A number that is skipped means that a
change was lost: the holder is then incomplete until its next snapshot. Of a complete holder only leading blocks count.
Of an incomplete one the deepest block that is known counts: nodes evict a block only after all that follow it, so a
lost "has" in the middle of a prefix says less than the "has" behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.core.types import Incarnation, Role


@dataclass(frozen=True, slots=True)
class Holder:
    """One life of one node, in one role."""

    node: Incarnation
    role: Role


@dataclass(frozen=True, slots=True)
class Change:
    """What one holder has told. Filled by its writer; the server adds the number."""

    holder: Holder
    number: int  # counts the changes of this holder, from 1
    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()
    is_reset: bool = False  # all that was told before is void; a snapshot is needed


@dataclass(slots=True)
class _Known:
    slot: int  # its bit in the block masks
    next_number: int
    complete: bool


class MirrorState:
    """At most `max_blocks` blocks; beyond that the oldest are forgotten, and no holder is complete any more."""

    def __init__(self, *, max_blocks: int) -> None:
        assert max_blocks > 0, max_blocks
        self._max_blocks = max_blocks
        self._masks: dict[bytes, int] = {}  # block -> bits of its holders; oldest block first
        self._known: dict[Holder, _Known] = {}
        self.is_truncated = False

    @property
    def num_blocks(self) -> int:
        return len(self._masks)

    @property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(self._known)

    def incomplete(self) -> tuple[Holder, ...]:
        """Return the holders whose next snapshot is due."""
        return tuple(holder for holder, known in self._known.items() if not known.complete)

    def apply(self, change: Change) -> None:
        """Take a change; one that was taken before is ignored."""
        known = self._known.get(change.holder)
        if known is None:
            known = self._enter(change.holder, next_number=1)
        if change.number < known.next_number and not change.is_reset:
            return
        if change.number > known.next_number or change.is_reset:
            known.complete = False
        known.next_number = change.number + 1
        self._add(known, change.added)
        self._remove(known, change.removed)

    def replace(self, holder: Holder, *, number: int, hashes: Iterable[bytes]) -> None:
        """Take a snapshot that includes the change of this number and all before it."""
        known = self._known.get(holder)
        if known is None:
            known = self._enter(holder, next_number=number + 1)
        elif number + 1 < known.next_number:
            return  # older than what is known
        self._clear(known)
        known.next_number, known.complete = number + 1, not self.is_truncated
        self._add(known, hashes)

    def doubt(self, holder: Holder) -> None:
        """Note that something of a holder may have been missed."""
        if holder in self._known:
            self._known[holder].complete = False

    def forget(self, holder: Holder) -> None:
        known = self._known.pop(holder, None)
        if known is not None:
            self._clear(known)

    def clear(self) -> None:
        self._masks.clear()
        self._known.clear()
        self.is_truncated = False

    def longest(self, hashes: Sequence[bytes]) -> dict[Holder, int]:
        """Return how many leading blocks of a prompt each holder has, also those that have none."""
        by_slot = {known.slot: holder for holder, known in self._known.items()}
        found = dict.fromkeys(self._known, len(hashes))
        present = sum(1 << slot for slot in by_slot)
        masks = self._masks
        for depth, one in enumerate(hashes):
            still = present & masks.get(one, 0)
            if still == present:  # nearly always, and there may be thousands of blocks
                continue
            for slot in _bits(present ^ still):
                found[by_slot[slot]] = depth
            if not (present := still):
                break
        self._look_deeper(hashes, found, by_slot)
        return found

    def _look_deeper(self, hashes: Sequence[bytes], found: dict[Holder, int], by_slot: dict[int, Holder]) -> None:
        doubted = sum(1 << known.slot for known in self._known.values() if not known.complete)
        for depth in range(len(hashes), 0, -1):
            if not doubted:
                return
            for slot in _bits(doubted & self._masks.get(hashes[depth - 1], 0)):
                found[by_slot[slot]] = depth
                doubted ^= 1 << slot

    def _enter(self, holder: Holder, *, next_number: int) -> _Known:
        taken = {known.slot for known in self._known.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._known[holder] = _Known(slot, next_number, complete=not self.is_truncated)
        return self._known[holder]

    def _add(self, known: _Known, hashes: Iterable[bytes]) -> None:
        bit = 1 << known.slot
        for one in hashes:
            self._masks[one] = self._masks.get(one, 0) | bit
        while len(self._masks) > self._max_blocks:
            del self._masks[next(iter(self._masks))]
            self.is_truncated = True
        if self.is_truncated:
            for each in self._known.values():
                each.complete = False

    def _remove(self, known: _Known, hashes: Iterable[bytes]) -> None:
        bit = 1 << known.slot
        for one in hashes:
            mask = self._masks.get(one, 0) & ~bit
            if mask:
                self._masks[one] = mask
            else:
                self._masks.pop(one, None)

    def _clear(self, known: _Known) -> None:
        bit = 1 << known.slot
        self._remove(known, [one for one, mask in self._masks.items() if mask & bit])


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
