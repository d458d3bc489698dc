"""What a request costs on each prefill node of a large fleet, for all of one page layout at once.

The formulas are those of `score.prefill_score`, part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.router.fetch import best_pull
from kvrelay.router.fetch_columns import FetchColumns
from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.node_columns import NodeColumns, first
from kvrelay.router.score import CROWDING, EVENNESS, EVICTION, Question, Score, prefill_score

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class PrefillColumns:
    """The prefill nodes of one page layout."""

    def __init__(self, nodes: Sequence[NodeView], rows: Sequence[int]) -> None:
        """`rows`: of these nodes in the roster `nodes`."""
        self.columns = NodeColumns(
            nodes, rows, ints=("queued_tokens",), costs=("start_s", "token_s", "pair_s", "break_even_tokens")
        )
        self._fetches = FetchColumns([nodes[row] for row in self.columns.rows], self.columns.ints["block_tokens"])
        self._exchanges: dict[int, Floats] = {}  # see `_exchanges_s`

    def update(self, row: int, node: NodeView) -> None:
        self.columns.update(row, node)
        self._exchanges.clear()

    def best(
        self,
        num: int,
        nodes: Sequence[NodeView],
        question: Question,
        refusing: Ints,
        cached: Ints,
        loads: Sequence[LoadColumns],
        sources: Sequence[NodeView],
    ) -> list[Score]:
        """Return the scores of the best `num` nodes, best first.

        Args:
            nodes: of the roster, as they are now.
            refusing: see `NodeColumns.refusing`; not all.
            cached: tokens of the prompt on each node.
            sources: see `fetch.sources_of`.
        """
        columns = self.columns
        usable = columns.usable(question, cached)
        alone_s = compute_s = self._compute_s(question, usable)
        fetched = self._fetches.best(
            question, usable, alone_s, sources, lambda behind: self._compute_s(question, behind)
        )
        if fetched is not None:
            compute_s = alone_s - fetched.saved_s
        recent_s = columns.recent_s(loads)
        recent_s[refusing] = np.inf
        least_s = float(recent_s.min())
        wait_s = self._wait_s(compute_s, loads)
        eviction_s = self._eviction_s(question, alone_s)
        evenness_s = EVENNESS * (recent_s - least_s)
        total_s = wait_s + (1 + CROWDING) * compute_s + eviction_s + evenness_s
        if fetched is not None:
            total_s += fetched.transfer_s
        at = first(num, total_s)
        of_each = (part[at].tolist() for part in (total_s, wait_s, compute_s, eviction_s, evenness_s))
        scores = [
            Score(
                nodes[row],
                {
                    "wait_s": wait,
                    "compute_s": compute,
                    "crowding_s": CROWDING * compute,
                    "eviction_s": eviction,
                    "evenness_s": evenness,
                },
                total,
            )
            for row, total, wait, compute, eviction, evenness in zip(columns.rows[at].tolist(), *of_each, strict=True)
        ]
        if fetched is None or not fetched.transfer_s[at].any():
            return scores
        nodes_at = [one.node for one in scores]
        return [  # what is fetched has parts of its own
            prefill_score(
                node, question.load(node), question, least_recent_s=least_s, pull=best_pull(node, question, sources)
            )
            for node in nodes_at
        ]

    def _compute_s(self, question: Question, usable: Ints) -> Floats:
        """Return the time in which each node computes what is behind so many tokens of the prompt."""
        cost, rest = self.columns.cost, question.prompt_tokens - usable
        alone_s = rest * cost["token_s"] + rest * (usable + rest / 2) * cost["pair_s"]
        compute_s: Floats = cost["start_s"] + alone_s / self.columns.ints["ring_size"]
        return compute_s + self._exchanges_s(question.long_prompt_tokens)

    def _exchanges_s(self, long_prompt_tokens: int) -> Floats:
        """Return what the exchanges of each node's ring take."""
        known = self._exchanges.get(long_prompt_tokens)
        if known is None:
            ring, cost = self.columns.ints["ring_size"], self.columns.cost
            even = np.where(cost["break_even_tokens"] == 0, long_prompt_tokens, cost["break_even_tokens"])
            exchanges_s = (1 - 1 / ring) * (even * cost["token_s"] + even * even / 2 * cost["pair_s"])
            self._exchanges.clear()  # a router has one such length
            known = self._exchanges[long_prompt_tokens] = exchanges_s
        return known

    def _wait_s(self, compute_s: Floats, loads: Sequence[LoadColumns]) -> Floats:
        ints = self.columns.ints
        placed = self.columns.tokens(loads)
        ahead_s, ours_s = self.columns.works_s(loads, compute_s)
        queued_s = np.maximum(ints["queued_tokens"], placed) * self.columns.cost["token_s"] / ints["ring_size"]
        wait_s: Floats = ahead_s + np.maximum(0.0, queued_s - ours_s)
        return wait_s

    def _eviction_s(self, question: Question, alone_s: Floats) -> Floats:
        free = self.columns.ints["free_pages"] * self.columns.ints["page_tokens"]
        eviction_s: Floats = EVICTION * alone_s * (free < question.prompt_tokens)
        return eviction_s
