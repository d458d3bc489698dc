"""What a request costs on each decode node of a large fleet, for all of one page layout at once.

The formulas are those of `score.decode_score` and `score.local_score`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.node_columns import NodeColumns, first, node_names, ranks_by_name
from kvrelay.router.score import CROWDING, Question, Score
from kvrelay.router.sharing import DecodesInTurn

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BestDecodes:
    """The decode nodes that may be chosen, and how they take turns."""

    scores: list[Score]  # best first, then those of other `near` ones
    near: list[NodeView]  # those that had best complete the prompt themselves
    in_turn: DecodesInTurn


class DecodeColumns:
    """The decode nodes of one page layout."""

    def __init__(self, nodes: Sequence[NodeView], rows: Sequence[int]) -> None:
        """`rows`: of these nodes in the roster `nodes`."""
        self.columns = NodeColumns(
            nodes, rows,
            ints=("max_batch", "active_requests", "local_tokens"),
            costs=(
                "relay_start_s", "relay_token_s", "step_s", "sequence_s", "context_token_s", "start_s", "token_s",
                "pair_s", "is_measured_local",
            ),
        )  # fmt: skip
        self._named = node_names(self.columns.incarnations)
        self._by_name = ranks_by_name(self.columns.incarnations)

    def update(self, row: int, node: NodeView) -> None:
        self.columns.update(row, node)

    def best(
        self,
        num: int,
        nodes: Sequence[NodeView],
        question: Question,
        refusing: Ints,
        cached: Ints,
        loads: Sequence[LoadColumns],
        prefill: NodeView,
    ) -> BestDecodes:
        """Return the scores of the best `num` nodes, best first, and of as many others at most that had best complete
        the prompt themselves.

        Args:
            nodes, refusing, cached: see `PrefillColumns.best`.
            prefill: its speed stands for that of nodes that have not measured their own.
        """
        columns, cost = self.columns, self.columns.cost
        placed = columns.counts(loads)
        usable = columns.usable(question, cached)
        active = np.maximum(columns.ints["active_requests"], placed["requests"])
        step_s = self._step_s(question, active, placed)
        relay_s = cost["relay_start_s"] + (question.prompt_tokens - usable) * cost["relay_token_s"]
        steps_s = question.expected_output * step_s
        total_s = relay_s + steps_s
        total_s[refusing] = np.inf
        free = (columns.ints["free_pages"] - placed["pages"]) * columns.ints["page_tokens"]
        must_evict = free < question.total_tokens
        at = first(num, total_s, must_evict)
        near = self._near(question, cached, total_s < np.inf)
        if len(near):
            local_s = steps_s[near] + self._local_s(near, question, cached, active, loads, prefill)
            near = near[first(num, local_s, must_evict[near])]
            at = np.concatenate([at, np.setdiff1d(near, at)])
        found = [nodes[row] for row in columns.rows[at].tolist()]
        of_each = (column[at].tolist() for column in (relay_s, steps_s, total_s, must_evict, step_s))
        scores = [
            Score(node, {"relay_s": relay, "steps_s": steps}, total, evicts, step)
            for node, relay, steps, total, evicts, step in zip(found, *of_each, strict=True)
        ]
        in_turn = DecodesInTurn(
            nodes, columns.rows, self._named, total_s, must_evict, usable, active, placed["turn"],
            cost["relay_token_s"], self._by_name, at,
        )  # fmt: skip
        return BestDecodes(scores, [nodes[row] for row in columns.rows[near]], in_turn)

    def _step_s(self, question: Question, active: Ints, placed: Mapping[str, Ints]) -> Floats:
        """Return the time between tokens on each node, with the request."""
        cost, most = self.columns.cost, self.columns.ints["max_batch"]
        sequences = active + 1
        together = np.where(most == 0, sequences, np.minimum(sequences, most))
        context = placed["context"] + (sequences - placed["requests"]) * question.context_tokens
        step_s: Floats = (cost["step_s"] + together * cost["sequence_s"]) * sequences / together
        return step_s + context * cost["context_token_s"]

    def _held(self, question: Question, cached: Ints, at: Ints) -> Ints:
        """Return the tokens of whole blocks that nodes have, never the prompt's last one."""
        block = self.columns.ints["block_tokens"][at]
        held: Ints = np.minimum(cached[at], (question.prompt_tokens - 1) // block * block)
        return held

    def _near(self, question: Question, cached: Ints, takes: Mask) -> Ints:
        """Return the nodes that might complete the prompt themselves."""
        at = (takes & (cached > 0)).nonzero()[0]
        if not len(at):
            return at
        held = self._held(question, cached, at)
        return at[(held > 0) & (question.prompt_tokens - held <= self.columns.ints["local_tokens"][at])]

    def _local_s(
        self,
        near: Ints,
        question: Question,
        cached: Ints,
        active: Ints,
        loads: Sequence[LoadColumns],
        prefill: NodeView,
    ) -> Floats:
        """Return the wait for other work on near nodes, the computation of what each lacks, and what it takes from
        the requests that it has."""
        cost, held = self.columns.cost, self._held(question, cached, near)
        tokens, is_measured = question.prompt_tokens - held, cost["is_measured_local"][near] > 0.0
        start_s, token_s, pair_s = (
            np.where(is_measured, cost[name][near], getattr(prefill.cost, name))
            for name in ("start_s", "token_s", "pair_s")
        )
        compute_s = start_s + tokens * token_s + tokens * (held + tokens / 2) * pair_s
        _, works_s = self.columns.works_s(loads, np.zeros(len(self.columns)))
        local_s: Floats = works_s[near] + compute_s + CROWDING * compute_s * active[near]
        return local_s
