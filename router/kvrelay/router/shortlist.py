"""The few nodes of a large fleet that may be chosen: `placement.place` over them gives what it gives over all.

Scores all nodes at once from columns, with the formulas of `score.py`, and keeps the best of each role and page layout
for `place` to look at. A test compares the choice with that among all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Incarnation, Role
from kvrelay.router.fetch_columns import FetchColumns
from kvrelay.router.load_columns import COUNTS, LoadColumns
from kvrelay.router.placement import Pair, place, refusal
from kvrelay.router.score import CROWDING, EVENNESS, EVICTION, Question
from kvrelay.router.sharing import DecodeColumns

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

SMALL_FLEET = 48  # among so few nodes, all are looked at one by one
_KEPT = 10  # of each role and layout; `place` tries the best 8 of each role together

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_INTS = (
    "ring_size", "max_model_len", "page_tokens", "total_pages", "free_pages", "active_requests", "queued_tokens",
    "block_tokens", "local_tokens", "max_batch",
)  # fmt: skip
_COSTS = (
    "start_s", "token_s", "pair_s", "break_even_tokens", "relay_start_s", "relay_token_s", "step_s", "sequence_s",
    "context_token_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one page layout."""

    prefill: Ints
    decode: Ints


@dataclass(frozen=True, slots=True)
class _Join:
    """Which slot of some loads and which row are of one node."""

    loads: LoadColumns
    version: int  # of the loads
    slots: Ints  # of each row
    rows: Ints  # of each slot; the number of rows for nodes that are not here

    def holds_for(self, loads: LoadColumns) -> bool:
        return self.loads is loads and (self.version, len(self.rows)) == (loads.version, loads.num_slots)


class Roster:
    """The nodes of a fleet as of one heartbeat, also as columns. Only `update` changes it."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self.nodes = list(nodes)
        self.row = {node.incarnation: row for row, node in enumerate(self.nodes)}
        self.num_prefill = sum(node.role is Role.PREFILL for node in self.nodes)
        self.block_tokens: dict[bytes, dict[Incarnation, int]] = {}  # of each node, by layout
        for node in self.nodes:
            self.block_tokens.setdefault(node.layout_fingerprint, {})[node.incarnation] = node.block_tokens
        self._columns: _Columns | None = None

    def update(self, node: NodeView) -> None:
        """Take another cost or state of a node, whose role and layout are as they were."""
        row = self.row[node.incarnation]
        self.nodes[row] = node
        if self._columns is not None:
            self._columns.set_row(row, node)

    def place(self, question: Question, loads: Sequence[LoadColumns]) -> Pair:
        """Choose as `placement.place` does.

        Args:
            loads: they add up to those of the question.

        Raises:
            As `placement.place`.
        """
        if len(self.nodes) <= SMALL_FLEET:
            return place(self.nodes, question)
        if self._columns is None:
            self._columns = _Columns(self.nodes)
        cached = self._by_row(question.cached_tokens)
        held = cached if question.held_tokens is None else self._by_row(question.held_tokens)
        rows = self._columns.fetches.sources(question, held)
        sources = {layout: [self.nodes[row] for row in of_layout] for layout, of_layout in rows.items()}
        few, refused, decodes = self._columns.shortlist(self.nodes, question, cached, loads, sources)
        if not few:
            return place(self.nodes, question)  # it says why nothing is left
        turn = decodes.whose_turn
        pair = place([self.nodes[row] for row in few], question, sources=sources, whose_turn=turn)
        return replace(pair, refused={**self._reasons(refused, question), **pair.refused}) if refused else pair

    def _by_row(self, tokens: Mapping[Incarnation, int]) -> Ints:
        by_row = np.zeros(len(self.nodes) + 1, np.int64)  # the last one is of nodes that are not here
        gone = len(self.nodes)
        rows = [gone if row is None else row for row in map(self.row.get, tokens)]
        by_row[rows] = list(tokens.values())
        return by_row[:gone]

    def _reasons(self, rows: Iterable[int], question: Question) -> dict[str, str]:
        nodes = [self.nodes[row] for row in rows]
        return {node.incarnation.name: why for node in nodes if (why := refusal(node, question)) is not None}


class _Columns:
    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = [node.incarnation for node in nodes]
        self._named: dict[str, list[int]] = {}
        for row, node in enumerate(self._nodes):
            self._named.setdefault(node.name, []).append(row)
        self._ints = {name: np.array([getattr(node, name) for node in nodes], np.int64) for name in _INTS}
        self._cost = {name: np.array([getattr(node.cost, name) for node in nodes], float) for name in _COSTS}
        self._draining = np.array([node.draining for node in nodes])
        self._is_measured_local = np.array([node.cost.is_measured_local for node in nodes])
        self._is_prefill = np.array([node.role is Role.PREFILL for node in nodes])
        layouts = {node.layout_fingerprint: number for number, node in enumerate(nodes)}
        layout = np.array([layouts[node.layout_fingerprint] for node in nodes])
        self._groups = {
            name: _Group(*(np.flatnonzero((layout == one) & of) for of in (self._is_prefill, ~self._is_prefill)))
            for name, one in layouts.items()
        }
        by_name = sorted(range(len(nodes)), key=lambda row: nodes[row].incarnation.name)
        self._name_rank = np.empty(len(nodes), np.int64)
        self._name_rank[by_name] = np.arange(len(nodes))
        self.fetches = FetchColumns(nodes, self._ints, self._name_rank)
        sizes, of_row = np.unique(self._ints["page_tokens"], return_inverse=True)
        self._page_sizes = sizes, of_row + self._is_prefill * len(sizes)  # see `_pages`
        self._rings: dict[int, tuple[Floats, Floats, Floats]] = {}  # see `_of_ring`
        self._joins: dict[int, _Join] = {}  # by identity of the loads

    def set_row(self, row: int, node: NodeView) -> None:
        for name, ints in self._ints.items():
            ints[row] = getattr(node, name)
        for name, costs in self._cost.items():
            costs[row] = getattr(node.cost, name)
        self._rings.clear()
        self._draining[row] = node.draining
        self._is_measured_local[row] = node.cost.is_measured_local

    def shortlist(
        self,
        nodes: Sequence[NodeView],
        question: Question,
        cached: Ints,
        loads: Sequence[LoadColumns],
        sources: Mapping[bytes, Sequence[NodeView]],
    ) -> tuple[list[int], list[int], DecodeColumns]:
        """Return (rows that may be chosen, rows that cannot take the request, what near equals are found by).

        Args:
            nodes: of the rows, as they are now.
        """
        ints = self._ints
        usable = np.zeros_like(cached)
        has_some = np.flatnonzero(cached)  # few nodes have anything, and most of what follows is the same without
        page = ints["page_tokens"][has_some]
        usable[has_some] = np.minimum(cached[has_some], question.prompt_tokens - 1) // page * page
        pages = self._pages(question)
        takes = ~self._draining & (ints["max_model_len"] >= question.total_tokens) & (pages <= ints["total_pages"])
        for row, node in enumerate(self._nodes) if question.avoid else ():
            takes[row] &= node not in question.avoid
        joins = [self._join(one) for one in loads]
        recent_s = sum([one.loads.recent_s(one.slots) for one in joins], np.zeros(len(cached)))
        counts = sum([one.loads.counts[one.slots] for one in joins], np.zeros((len(cached), len(COUNTS)), np.int64))
        placed = dict(zip(COUNTS, counts.T, strict=True))
        alone_s = self._compute_s(question, usable, has_some)
        fetch_s, saved_s = self.fetches.best(
            question, usable, alone_s, sources, lambda behind: self._compute_s(question, behind, np.flatnonzero(behind))
        )
        compute_s = alone_s - saved_s
        ahead_s, works_s = self._works(compute_s, joins)
        prefill_s = fetch_s + self._prefill_s(compute_s, alone_s, ahead_s, works_s, pages, placed["tokens"])
        decode_s, steps_s, must_evict = self._decode_s(question, usable, has_some, pages, placed)
        few: set[int] = set()
        rows: dict[bytes, Ints] = {}
        for layout, group in self._groups.items():
            prefill, decode = group.prefill[takes[group.prefill]], group.decode[takes[group.decode]]
            if not len(prefill) or (question.needs_decode and not len(decode)):
                continue
            least = recent_s[prefill].min()
            total_s = prefill_s[prefill] + EVENNESS * (recent_s[prefill] - least)
            rows[layout] = decode
            best = self._best(prefill, total_s, np.zeros(len(prefill), bool))
            few.update(best)
            few.add(int(prefill[recent_s[prefill].argmin()]))  # evenness is relative to it
            if question.needs_decode:
                few.update(self._best(decode, decode_s[decode], must_evict[decode]))
                near, tokens = self._near(decode, question, cached)
                local_s = self._local_s(near, tokens, question, best[0], placed)
                few.update(self._best(near, works_s[near] + local_s + steps_s[near], must_evict[near]))
        decodes = DecodeColumns(
            nodes, self._named, rows, decode_s, must_evict, usable, self._active(placed), placed["turn"],
            self._cost["relay_token_s"], self._name_rank, few,
        )  # fmt: skip
        return sorted(few), np.flatnonzero(~takes).tolist(), decodes

    def _pages(self, question: Question) -> Ints:
        """Return the pages that the request takes of each node; nearly all have pages of one size."""
        sizes, of_row = self._page_sizes
        of_size = [-(-tokens // sizes) for tokens in (question.total_tokens, question.prompt_tokens)]
        pages: Ints = np.concatenate(of_size)[of_row]
        return pages

    def _near(self, decode: Ints, question: Question, cached: Ints) -> tuple[Ints, Ints]:
        """Return the decode nodes that might complete the prompt themselves, and the tokens that each lacks."""
        decode = decode[cached[decode] > 0]
        block = self._ints["block_tokens"][decode]
        held = np.minimum(cached[decode], (question.prompt_tokens - 1) // block * block)
        lacks = question.prompt_tokens - held
        is_near = (held > 0) & (lacks <= self._ints["local_tokens"][decode])
        return decode[is_near], lacks[is_near]

    def _local_s(
        self, near: Ints, tokens: Ints, question: Question, prefill: int, placed: Mapping[str, Ints]
    ) -> Floats:
        """Return what computing tokens takes on decode nodes, and what it takes from the requests that they have.

        Args:
            prefill: row of the node whose speed stands for that of decode nodes that have not measured theirs.
        """
        cost_row = np.where(self._is_measured_local[near], near, prefill)
        start_s, token_s, pair_s = (self._cost[name][cost_row] for name in ("start_s", "token_s", "pair_s"))
        held = question.prompt_tokens - tokens
        compute = start_s + tokens * token_s + (tokens * held + tokens * tokens / 2) * pair_s
        local_s: Floats = compute + CROWDING * compute * self._active(placed)[near]
        return local_s

    def _best(self, rows: Ints, total_s: Floats, must_evict: Mask) -> list[int]:
        """Return the first rows in the order of `Score.order`."""
        micro = np.rint(total_s * 1e6)
        if len(rows) > 4 * _KEPT:  # sort only what can be among the first
            rank = micro + np.where(must_evict, 1e18, 0.0)
            near = rank <= np.partition(rank, _KEPT)[_KEPT]
            rows, micro, must_evict = rows[near], micro[near], must_evict[near]
        order = np.lexsort((self._name_rank[rows], -self._ints["ring_size"][rows], micro, must_evict))
        best: list[int] = rows[order[:_KEPT]].tolist()
        return best

    def _compute_s(self, question: Question, usable: Ints, has_some: Ints) -> Floats:
        """Return the time of the prompt's computation on each prefill node; of decode nodes it says nothing."""
        base_s, token_s, pair_s = self._of_ring(question.long_prompt_tokens)
        tokens = question.prompt_tokens
        compute: Floats = base_s + tokens * token_s + tokens * tokens / 2 * pair_s
        held, rest = usable[has_some], tokens - usable[has_some]
        compute[has_some] = (
            base_s[has_some] + rest * token_s[has_some] + (rest * held + rest * rest / 2) * pair_s[has_some]
        )
        return compute

    def _of_ring(self, long_prompt_tokens: int) -> tuple[Floats, Floats, Floats]:
        """Return (what a prefill takes whatever its length, per token, per pair) with each node's ring."""
        known = self._rings.get(long_prompt_tokens)
        if known is None:
            ring, cost = self._ints["ring_size"], self._cost
            even = np.where(cost["break_even_tokens"] == 0, long_prompt_tokens, cost["break_even_tokens"])
            exchanges = even * cost["token_s"] + even * even / 2 * cost["pair_s"]
            base_s = cost["start_s"] + np.where(ring == 1, 0.0, (1 - 1 / ring) * exchanges)
            self._rings.clear()  # a router has one such length
            known = self._rings[long_prompt_tokens] = base_s, cost["token_s"] / ring, cost["pair_s"] / ring
        return known

    def _prefill_s(
        self, compute: Floats, alone: Floats, ahead: Floats, ours: Floats, pages: Ints, placed_tokens: Ints
    ) -> Floats:
        """Return the sum of a prefill score's parts without fetch and evenness, for all rows.

        Args:
            compute, alone: time of what a node computes, and of what it would without fetching.
            ahead, ours: see `_works`.
        """
        ints = self._ints
        queued_s = np.maximum(ints["queued_tokens"], placed_tokens) * self._cost["token_s"] / ints["ring_size"]
        wait = ahead + np.maximum(0.0, queued_s - ours)
        eviction = np.where(ints["free_pages"] < pages, EVICTION * alone, 0.0)
        total_s: Floats = wait + compute + CROWDING * compute + eviction
        return total_s

    def _works(self, compute: Floats, joins: Sequence[_Join]) -> tuple[Floats, Floats]:
        """Return what goes before a request of these compute times, and all work, per row in seconds."""
        num = len(compute)
        ahead, ours = np.zeros(num), np.zeros(num)
        for one in joins:
            work_s, work_slot = one.loads.works()
            row = one.rows[work_slot]
            ahead += np.bincount(row, np.minimum(work_s, np.append(compute, 0.0)[row]), num + 1)[:num]
            ours += np.bincount(row, work_s, num + 1)[:num]
        return ahead, ours

    def _decode_s(
        self,
        question: Question,
        usable: Ints,
        has_some: Ints,
        pages: Ints,
        placed: Mapping[str, Ints],
    ) -> tuple[Floats, Floats, Mask]:
        """Return (decode scores, their part for the answer's steps, who must evict), for all rows."""
        cost, active = self._cost, self._active(placed)
        most = self._ints["max_batch"]
        together = np.where(most == 0, active + 1, np.minimum(active + 1, most))
        context = placed["context"] + (active + 1 - placed["requests"]) * question.context_tokens
        step = (cost["step_s"] + together * cost["sequence_s"]) * (active + 1) / together
        steps: Floats = question.expected_output * (step + context * cost["context_token_s"])
        relay = cost["relay_start_s"] + question.prompt_tokens * cost["relay_token_s"]
        relay[has_some] -= usable[has_some] * cost["relay_token_s"][has_some]  # the last token is never resident
        return relay + steps, steps, self._ints["free_pages"] - placed["pages"] < pages

    def _active(self, placed: Mapping[str, Ints]) -> Ints:
        active: Ints = np.maximum(self._ints["active_requests"], placed["requests"])
        return active

    def _join(self, loads: LoadColumns) -> _Join:
        known = self._joins.get(id(loads))
        if known is None or not known.holds_for(loads):
            if len(self._joins) > 8:  # of routers that are gone
                self._joins.clear()
            slots = loads.slots(self._nodes)
            rows = np.full(loads.num_slots, len(slots))
            rows[slots] = np.arange(len(slots))
            known = self._joins[id(loads)] = _Join(loads, loads.version, slots, rows)
        return known
