"""What routers have placed on nodes, as columns that change in place: a whole fleet is scored from them at once."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Incarnation
from kvrelay.router.score import Load

RECENT_S = 3600.0  # work given to a node fades from what counts as its share with this time constant
_MOST_FADED_S = 20 * RECENT_S  # the common unit of faded work is renewed after this
_LEAST_ROOM = 64

COUNTS = ("requests", "tokens", "pages", "context", "turn")  # of `Load`; turn: number of the latest request
_REQUESTS, _TOKENS, _TURN = map(COUNTS.index, ("requests", "tokens", "turn"))

T = TypeVar("T")
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class LoadColumns(Mapping[Incarnation, Load]):
    """The load of every node that has any, now or lately; each node has a slot in all columns.

    As a mapping it shows the loads as they are when it is asked.
    """

    def __init__(self) -> None:
        self.version = 0  # changes when a slot goes to another node
        self._changed: set[Incarnation] = set()  # since `take_changed`
        self._counts: Ints = np.zeros((_LEAST_ROOM, len(COUNTS)), np.int64)  # by slot; together, to be read in one go
        self._turns = 0
        self._recent: Floats = np.zeros(_LEAST_ROOM)  # in units that were seconds at _unit_s
        self._unit_s = 0.0
        self._fade = 1.0  # what is left now of a unit
        self._slots: dict[Incarnation, int] = {}
        self._nodes: list[Incarnation | None] = []
        self._free: list[int] = []
        self._work_s: Floats = np.zeros(_LEAST_ROOM)
        self._work_slot: Ints = np.zeros(_LEAST_ROOM, np.int64)
        self._num_works = 0
        self._free_works: list[int] = []
        self._works: dict[int, list[float]] = {}  # slot -> its works, shortest first
        self._fetches: dict[int, dict[int, int]] = {}  # slot -> tokens of what is fetched from it, oldest first
        self._num_fetches = 0  # ever

    def slot(self, node: Incarnation) -> int:
        """Return the slot of a node; one that has none gets one."""
        slot = self._slots.get(node)
        if slot is None:
            if self._free:
                slot = self._free.pop()
                self._nodes[slot] = node
            else:
                slot = len(self._nodes)
                self._nodes.append(node)
                self._make_room(slot)
            self._slots[node] = slot
        return slot

    def slots(self, nodes: Sequence[Incarnation]) -> Ints:
        return np.fromiter(map(self.slot, nodes), np.int64, len(nodes))

    @property
    def num_slots(self) -> int:
        return len(self._nodes)

    @property
    def num_nodes(self) -> int:
        return len(self._slots)

    @property
    def has_requests(self) -> bool:
        return bool(self._counts[:, _REQUESTS].any())

    def node(self, slot: int) -> Incarnation:
        node = self._nodes[slot]
        assert node is not None, slot
        return node

    def add(self, node: Incarnation, *, requests: int = 0, tokens: int = 0, pages: int = 0, context: int = 0) -> None:
        slot = self.slot(node)
        self._changed.add(node)
        counts = self._counts[slot]
        for at, more in enumerate((requests, tokens, pages, context)):
            if more:
                counts[at] += more

    def put(self, node: Incarnation, work_s: float) -> int:
        """Enter work ahead on a node; `take` it with what this returns."""
        slot = self.slot(node)
        if self._free_works:
            at = self._free_works.pop()
        else:
            at, self._num_works = self._num_works, self._num_works + 1
            if at == len(self._work_s):
                self._work_s, self._work_slot = _longer(self._work_s), _longer(self._work_slot)
        self._changed.add(node)
        self._work_s[at], self._work_slot[at] = work_s, slot
        insort(self._works.setdefault(slot, []), work_s)
        return at

    def take(self, at: int) -> None:
        slot = int(self._work_slot[at])
        works = self._works[slot]
        del works[bisect_left(works, self._work_s[at])]
        if not works:
            del self._works[slot]
        self._work_s[at] = 0.0
        self._changed.add(self.node(slot))
        self._free_works.append(at)

    def put_fetch(self, source: Incarnation, tokens: int) -> int:
        """Enter a fetch from a node; `take_fetch` it with what this returns."""
        self._num_fetches += 1
        self._fetches.setdefault(self.slot(source), {})[self._num_fetches] = tokens
        self._changed.add(source)
        return self._num_fetches

    def take_fetch(self, source: Incarnation, at: int) -> None:
        slot = self.slot(source)
        del self._fetches[slot][at]
        if not self._fetches[slot]:
            del self._fetches[slot]
        self._changed.add(source)

    def works(self) -> tuple[Floats, Ints]:
        """Return the works of all nodes in seconds, and the slots of their nodes; some are 0."""
        return self._work_s[: self._num_works], self._work_slot[: self._num_works]

    def at(self, now_s: float) -> None:
        """Let recent work fade to this time."""
        self._fade = math.exp((self._unit_s - now_s) / RECENT_S)
        if now_s - self._unit_s > _MOST_FADED_S:
            self._recent *= self._fade
            self._unit_s, self._fade = now_s, 1.0

    def worked(self, node: Incarnation, work_s: float) -> None:
        """Count work as given to a node now."""
        self._recent[self.slot(node)] += work_s / self._fade
        self._changed.add(node)

    def count_turn(self, nodes: Iterable[Incarnation]) -> None:
        """Note that a request was placed on these nodes, later than all before."""
        self._turns += 1
        for node in nodes:
            self._counts[self.slot(node), _TURN] = self._turns

    def counts(self, slots: Ints) -> Ints:
        """Return the counts of the nodes of some slots: a row of COUNTS each."""
        counts: Ints = self._counts[slots]
        return counts

    def tokens(self, slots: Ints) -> Ints:
        """Return `Load.tokens` of the nodes of some slots."""
        tokens: Ints = self._counts[slots, _TOKENS]
        return tokens

    def recent_s(self, slots: Ints) -> Floats:
        """Return what is left of the recent work of the nodes of some slots."""
        left: Floats = self._recent[slots] * self._fade
        return left

    def forget_idle(self, *, keep: int) -> None:
        """Drop nodes that have nothing, those with the least recent work first, until so many are left."""
        busy = self._works.keys() | self._fetches.keys()
        idle = [node for node, slot in self._slots.items() if not self._counts[slot, _REQUESTS] and slot not in busy]
        idle.sort(key=lambda node: self._recent[self._slots[node]])
        for node in idle[: max(0, len(self._slots) - keep)]:
            slot = self._slots.pop(node)
            self._changed.add(node)
            self._nodes[slot] = None
            self._counts[slot], self._recent[slot] = 0, 0.0
            self._free.append(slot)
            self.version += 1

    def __getitem__(self, node: Incarnation) -> Load:
        load = self.get(node)
        if load is None:
            raise KeyError(node)
        return load

    @overload
    def get(self, node: Incarnation, /) -> Load | None: ...
    @overload
    def get(self, node: Incarnation, /, default: Load | T) -> Load | T: ...
    def get(self, node: Incarnation, /, default: object = None) -> object:
        # Each placement asks for tens of loads, and most nodes have none: an exception would cost more than the rest.
        slot = self._slots.get(node)
        if slot is None:
            return default
        works, fetches = self._works.get(slot), self._fetches.get(slot)
        requests, tokens, pages, context, turn = self._counts[slot].tolist()
        recent_s = float(self._recent[slot])
        if not (works or requests or tokens or pages or recent_s or turn or fetches):
            return default
        works_s = tuple(works) if works else ()
        fetched = tuple(fetches.values()) if fetches else ()
        return Load(requests, tokens, pages, works_s, recent_s * self._fade, context, fetched, turn)

    def take_changed(self) -> set[Incarnation]:
        """Return the nodes whose load has changed since this was last asked; that it fades is no change."""
        changed, self._changed = self._changed, set()
        return changed

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __iter__(self) -> Iterator[Incarnation]:
        return iter([node for node in self._slots if self.get(node) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _make_room(self, slot: int) -> None:
        if slot >= len(self._counts):
            self._counts, self._recent = _longer(self._counts), _longer(self._recent)


def _longer(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([column, np.zeros_like(column)])
