"""A copy of the prefix index in memory: which holder has which block, and how sure that is. Pure.

It is fed with changes, which each holder numbers from 1, and with snapshots. A number that is skipped means that a
change was lost: the holder is then incomplete until its next snapshot. Of a complete holder only leading blocks count.
Of an incomplete one the deepest block that is known counts: nodes evict a block only after all that follow it, so a
lost "has" in the middle of a prefix says less than the "has" behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

from kvrelay.core.bits import positions
from kvrelay.core.types import Incarnation, Role, Tier


@dataclass(frozen=True, slots=True)
class Holder:
    """One tier of one life of one node, in one role."""

    node: Incarnation
    role: Role
    tier: Tier = Tier.DEVICE


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
    slot: int
    bit: int  # 1 << slot: its bit in the block masks
    next_number: int


class MirrorState:
    """At most `max_blocks` blocks; beyond that the oldest are forgotten, and no holder is complete any more."""

    def __init__(self, *, max_blocks: int) -> None:
        assert max_blocks > 0, max_blocks
        self._max_blocks = max_blocks
        self._masks: dict[bytes, int] = {}  # block -> bits of its holders; oldest block first
        self._known: dict[Holder, _Known] = {}
        self._by_slot: dict[int, Holder] = {}
        self._doubted = 0  # bits of the incomplete holders
        self.is_truncated = False

    @property
    def num_blocks(self) -> int:
        return len(self._masks)

    @property
    def holders(self) -> tuple[Holder, ...]:
        return tuple(self._known)

    def known(self) -> KeysView[Holder]:
        return self._known.keys()

    def incomplete(self) -> tuple[Holder, ...]:
        """Return the holders whose next snapshot is due."""
        return tuple(self._by_slot[slot] for slot in positions(self._doubted))

    def apply(self, change: Change) -> None:
        """Take a change; one that was taken before is ignored."""
        known = self._known.get(change.holder)
        if known is None:
            known = self._enter(change.holder, next_number=1)
        if change.number < known.next_number and not change.is_reset:
            return
        if change.number > known.next_number or change.is_reset:
            self._doubted |= known.bit
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
        known.next_number = number + 1
        self._doubted &= ~known.bit  # unless what follows does not fit
        self._doubt_if_truncated()
        self._add(known, hashes)

    def doubt(self, holder: Holder) -> None:
        """Note that something of a holder may have been missed."""
        if holder in self._known:
            self._doubted |= self._known[holder].bit

    def forget(self, holder: Holder) -> None:
        known = self._known.pop(holder, None)
        if known is not None:
            self._clear(known)
            del self._by_slot[known.slot]
            self._doubted &= ~known.bit

    def clear(self) -> None:
        self._masks.clear()
        self._known.clear()
        self._by_slot.clear()
        self._doubted = 0
        self.is_truncated = False

    def longest(self, hashes: Sequence[bytes]) -> dict[Holder, int]:
        """Return how many leading blocks of a prompt each holder has, also those that have none."""
        return dict.fromkeys(self._known, 0) | dict(self.found(hashes))

    def found(self, hashes: Sequence[bytes]) -> list[tuple[Holder, int]]:
        """Return how many leading blocks of a prompt each holder has; those that have none are left out."""
        found: dict[int, int] = {}  # by slot
        masks = self._masks
        present = masks.get(hashes[0], 0) if hashes else 0
        for depth, one in enumerate(hashes):
            still = present & masks.get(one, 0)
            if still == present and present:  # nearly always, and there may be thousands of blocks
                continue
            found.update(dict.fromkeys(positions(present ^ still), depth))
            if not (present := still):
                break
        found.update(dict.fromkeys(positions(present), len(hashes)))
        self._look_deeper(hashes, found)
        by_slot = self._by_slot
        return [(by_slot[slot], depth) for slot, depth in found.items()]

    def _look_deeper(self, hashes: Sequence[bytes], found: dict[int, int]) -> None:
        doubted = self._doubted
        for depth in range(len(hashes), 0, -1):
            if not doubted:
                return
            if here := doubted & self._masks.get(hashes[depth - 1], 0):
                found.update(dict.fromkeys(positions(here), depth))
                doubted ^= here

    def _enter(self, holder: Holder, *, next_number: int) -> _Known:
        slot = next(slot for slot in range(len(self._by_slot) + 1) if slot not in self._by_slot)
        self._by_slot[slot] = holder
        known = self._known[holder] = _Known(slot, 1 << slot, next_number)
        self._doubt_if_truncated()
        return known

    def _add(self, known: _Known, hashes: Iterable[bytes]) -> None:
        masks, bit = self._masks, known.bit
        for one in hashes:
            mask = masks.get(one)
            masks[one] = bit if mask is None else mask | bit  # the same object for all blocks of one holder
        while len(masks) > self._max_blocks:
            del masks[next(iter(masks))]
            self.is_truncated = True
        self._doubt_if_truncated()

    def _doubt_if_truncated(self) -> None:
        if self.is_truncated:
            for known in self._known.values():
                self._doubted |= known.bit

    def _remove(self, known: _Known, hashes: Iterable[bytes]) -> None:
        without = ~known.bit
        for one in hashes:
            mask = self._masks.get(one, 0) & without
            if mask:
                self._masks[one] = mask
            else:
                self._masks.pop(one, None)

    def _clear(self, known: _Known) -> None:
        self._remove(known, [one for one, mask in self._masks.items() if mask & known.bit])
