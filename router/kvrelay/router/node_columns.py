"""The nodes of one role and page layout as columns, and what can be said of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Incarnation
from kvrelay.router.load_columns import COUNTS, LoadColumns
from kvrelay.router.score import Question

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_EVICTS = 2.0**52  # microseconds: sorts behind all that need not evict, and what is added to it stays exact
_NOBODY: Ints = np.zeros(0, np.int64)
_MAX_JOINS = 8  # beyond that, of routers that are gone


@dataclass(frozen=True, slots=True)
class _Join:
    """Which slot of some loads and which place among the nodes are of one node."""

    loads: LoadColumns
    version: int  # of the loads
    slots: Ints  # of each node
    places: Ints  # of each slot; the number of nodes for nodes that are not here

    def holds_for(self, loads: LoadColumns) -> bool:
        return self.loads is loads and (self.version, len(self.places)) == (loads.version, loads.num_slots)


class NodeColumns:
    """Some nodes of a roster. They stand in the order of `Score.order` for equal costs: the larger ring, the name."""

    def __init__(
        self, nodes: Sequence[NodeView], rows: Sequence[int], *, ints: Sequence[str], costs: Sequence[str]
    ) -> None:
        """`rows`: of the nodes in the roster; `ints`, `costs`: the columns besides those that every role needs."""
        ordered = sorted(rows, key=lambda row: (-nodes[row].ring_size, nodes[row].incarnation.name))
        ints = (*ints, "ring_size", "block_tokens", "page_tokens", "free_pages", "total_pages", "max_model_len")
        self.rows = np.array(ordered, np.int64)
        self.incarnations = [nodes[row].incarnation for row in ordered]
        self.place = {row: place for place, row in enumerate(ordered)}
        self._ints_of, self._costs_of = attrgetter(*ints), attrgetter(*costs)
        self._ints = np.zeros((len(ints), len(rows)), np.int64)
        self._costs = np.zeros((len(costs), len(rows)))
        self._longest, self._room = np.zeros((2, len(rows)), np.int64)  # see `refusing`
        self._least_longest = self._least_room = -1  # -1: not known
        self.ints = dict(zip(ints, self._ints, strict=True))
        self.cost = dict(zip(costs, self._costs, strict=True))
        self._joins: dict[int, _Join] = {}  # by identity of the loads
        for row in ordered:
            self.update(row, nodes[row])

    def __len__(self) -> int:
        return len(self.rows)

    def update(self, row: int, node: NodeView) -> None:
        place = self.place[row]
        self._ints[:, place] = self._ints_of(node)
        self._costs[:, place] = self._costs_of(node.cost)
        self._longest[place] = 0 if node.draining else node.max_model_len
        self._room[place] = node.total_pages * node.page_tokens
        self._least_longest = self._least_room = -1

    def refusing(self, question: Question, own_tokens: int) -> Ints:
        """Return the places that cannot take a request, which needs room for `own_tokens` here; see `refusal`."""
        if self._least_room < 0 and len(self):
            self._least_longest, self._least_room = int(self._longest.min()), int(self._room.min())
        if question.total_tokens <= self._least_longest and own_tokens <= self._least_room and not question.avoid:
            return _NOBODY  # as nearly always
        refuses = (self._longest < question.total_tokens) | (self._room < own_tokens)
        for place, node in enumerate(self.incarnations) if question.avoid else ():
            refuses[place] |= node in question.avoid
        return refuses.nonzero()[0]

    def usable(self, question: Question, cached: Ints) -> Ints:
        """Return `Question.usable` of what each node has."""
        page = self.ints["page_tokens"]
        usable: Ints = np.minimum(cached, question.prompt_tokens - 1) // page * page
        return usable

    def counts(self, loads: Sequence[LoadColumns]) -> dict[str, Ints]:
        """Return the sums of `Load.requests` and the other counts, by name."""
        found = [one.counts(self._join(one).slots) for one in loads]
        total = sum(found[1:], found[0]) if found else np.zeros((len(self), len(COUNTS)), np.int64)
        return dict(zip(COUNTS, total.T, strict=True))

    def tokens(self, loads: Sequence[LoadColumns]) -> Ints:
        """Return the sum of `Load.tokens`."""
        tokens: Ints = sum([one.tokens(self._join(one).slots) for one in loads], np.zeros(len(self), np.int64))
        return tokens

    def recent_s(self, loads: Sequence[LoadColumns]) -> Floats:
        """Return the sum of `Load.recent_s`."""
        recent_s: Floats = sum([one.recent_s(self._join(one).slots) for one in loads], np.zeros(len(self)))
        return recent_s

    def works_s(self, loads: Sequence[LoadColumns], compute_s: Floats) -> tuple[Floats, Floats]:
        """Return (what goes before a request of these compute times, all work) of each node."""
        num = len(self)
        ahead_s, all_s = np.zeros(num), np.zeros(num)
        most_s = np.zeros(num + 1)
        most_s[:num] = compute_s
        for one in loads:
            work_s, slot = one.works()
            place = self._join(one).places[slot]
            ahead_s += np.bincount(place, np.minimum(work_s, most_s[place]), num + 1)[:num]
            all_s += np.bincount(place, work_s, num + 1)[:num]
        return ahead_s, all_s

    def _join(self, loads: LoadColumns) -> _Join:
        known = self._joins.get(id(loads))
        if known is None or not known.holds_for(loads):
            if len(self._joins) > _MAX_JOINS:
                self._joins.clear()
            slots = loads.slots(self.incarnations)
            places = np.full(loads.num_slots, len(slots))
            places[slots] = np.arange(len(slots))
            known = self._joins[id(loads)] = _Join(loads, loads.version, slots, places)
        return known


def first(num: int, total_s: Floats, must_evict: Mask | None = None) -> Ints:
    """Return the first `num` places of nodes that stand as in `NodeColumns`, in the order of `Score.order`.

    Args:
        total_s: infinite for nodes that are to be left out.
    """
    rank = np.rint(total_s * 1e6)
    if must_evict is not None:
        rank += must_evict * _EVICTS
    if len(rank) <= 4 * num:
        best = rank.argsort(kind="stable")[:num]
    else:
        near = (rank <= np.partition(rank, num)[num]).nonzero()[0]  # sort only what can be among the first
        best = near[rank[near].argsort(kind="stable")[:num]]
    return best[rank[best] < np.inf]


def node_names(incarnations: Sequence[Incarnation]) -> dict[str, list[int]]:
    """Return the places of each name; the lives of one node have one name."""
    named: dict[str, list[int]] = {}
    for place, node in enumerate(incarnations):
        named.setdefault(node.name, []).append(place)
    return named


def ranks_by_name(incarnations: Sequence[Incarnation]) -> Ints:
    """Return each node's rank in the order of names."""
    ranks = np.empty(len(incarnations), np.int64)
    ranks[sorted(range(len(incarnations)), key=lambda place: incarnations[place].name)] = np.arange(len(incarnations))
    return ranks
