"""The few nodes of a large fleet that may be chosen: `placement.pick` among them gives what `place` gives over all.

All nodes are scored at once from columns, with the formulas of `score.py`, and what is picked from are the best of each
role and page layout. A test compares the choice with that among all nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Incarnation, Role
from kvrelay.router.decode_columns import DecodeColumns
from kvrelay.router.fetch_columns import SourceColumns
from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.placement import Candidates, Pair, pick, place, refusal
from kvrelay.router.prefill_columns import PrefillColumns
from kvrelay.router.score import Question
from kvrelay.router.sharing import Turn

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

SMALL_FLEET = 48  # among so few nodes, all are looked at one by one
_KEPT = 10  # of each role and layout; `pick` tries the best 8 of each role together

Ints = npt.NDArray[np.int64]


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
        """Take a node's new cost or load, or that it drains; all else about it is as it was."""
        row = self.row[node.incarnation]
        self.nodes[row] = node
        if self._columns is not None:
            self._columns.update(row, node)

    def prepare(self) -> None:
        """Make the columns, if `place` will need them."""
        if self._columns is None and len(self.nodes) > SMALL_FLEET:
            self._columns = _Columns(self.nodes)

    def place(self, question: Question, loads: Sequence[LoadColumns]) -> Pair:
        """Choose as `placement.place` does.

        Args:
            loads: they add up to those of the question.

        Raises:
            As `placement.place`.
        """
        self.prepare()
        if self._columns is None:
            return place(self.nodes, question)
        cached = self._by_row(question.cached_tokens)
        held = cached if question.held_tokens is None else self._by_row(question.held_tokens)
        rows = self._columns.sources.rows(question, held)
        sources = {layout: [self.nodes[row] for row in of_layout] for layout, of_layout in rows.items()}
        candidates: dict[bytes, Candidates] = {}
        refused: dict[str, str] = {}
        for layout, both in self._columns.layouts.items():
            found = both.candidates(self.nodes, question, cached, loads, sources.get(layout, ()), refused)
            if found is not None:
                candidates[layout] = found
        pair = pick(candidates, question, sources, refused)
        return place(self.nodes, question) if pair is None else pair  # else it says why nothing is left

    def _by_row(self, tokens: Mapping[Incarnation, int]) -> Ints:
        by_row = np.zeros(len(self.nodes) + 1, np.int64)  # the last one is of nodes that are not here
        gone = len(self.nodes)
        rows = [gone if row is None else row for row in map(self.row.get, tokens)]
        by_row[rows] = list(tokens.values())
        return by_row[:gone]


class _Columns:
    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self.sources = SourceColumns(nodes)
        self.layouts: dict[bytes, _Layout] = {}
        rows: dict[bytes, tuple[list[int], list[int]]] = {}
        for row, node in enumerate(nodes):
            rows.setdefault(node.layout_fingerprint, ([], []))[node.role is Role.DECODE].append(row)
        for layout, (prefills, decodes) in rows.items():
            self.layouts[layout] = _Layout(PrefillColumns(nodes, prefills), DecodeColumns(nodes, decodes))

    def update(self, row: int, node: NodeView) -> None:
        self.sources.update(row, node)
        both = self.layouts[node.layout_fingerprint]
        (both.prefill if node.role is Role.PREFILL else both.decode).update(row, node)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The nodes of one page layout."""

    prefill: PrefillColumns
    decode: DecodeColumns

    def candidates(
        self,
        nodes: Sequence[NodeView],
        question: Question,
        cached: Ints,
        loads: Sequence[LoadColumns],
        sources: Sequence[NodeView],
        refused: dict[str, str],
    ) -> Candidates | None:
        """Return the best nodes; None without one of each role that is needed.

        Args:
            nodes, cached: of the roster, by row.
            refused: gets the nodes that cannot take the request, and why.
        """
        prefill, decode = self.prefill.columns, self.decode.columns
        no_prompt = prefill.refusing(question, question.prompt_tokens)
        no_decode = decode.refusing(question, question.total_tokens)
        for row in (*prefill.rows[no_prompt].tolist(), *decode.rows[no_decode].tolist()):
            if (why := refusal(nodes[row], question)) is not None:
                refused[nodes[row].incarnation.name] = why
        if len(no_prompt) == len(prefill) or (question.needs_decode and len(no_decode) == len(decode)):
            return None
        prefills = self.prefill.best(_KEPT, nodes, question, no_prompt, cached[prefill.rows], loads, sources)
        if not question.needs_decode:
            return Candidates(prefills, (), (), lambda _, best: Turn(best.node))  # nobody asks
        best = self.decode.best(_KEPT, nodes, question, no_decode, cached[decode.rows], loads, prefills[0].node)
        return Candidates(prefills, best.scores, best.near, partial(best.in_turn.whose_turn, question=question))
