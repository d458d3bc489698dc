"""Which decode node takes a request when their costs are too close to tell them apart. Pure.

Costs are predictions from fits that are some per cent off. A node that is cheaper by less than that is cheaper by
chance, and by the same chance for every request: of two equal nodes one would get all of a light load. So all that are
that close to the best one take turns: first who has fewer requests, then whose latest one is longest ago. One that
lacks much of the prompt that another of them has takes no turn: a conversation stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Incarnation
from kvrelay.router.score import Question, Score, further_link_s

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

NOISE = 0.05  # of a decode node's cost: what fits of equal devices differ by, from one to the next
LEAST_NOISE_S = 0.002
_PROMPT_SHARE = 10  # a node that lacks more than a tenth of the prompt that another one has is not as good

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def noise_s(total_s: float) -> float:
    """Return by how much a decode node's cost may be off."""
    return max(NOISE * total_s, LEAST_NOISE_S)


def near_equals(prefill: NodeView, best: Score, decodes: Iterable[Score], question: Question) -> list[Score]:
    """Return the decode nodes that are as good as the best one as far as costs can tell, the next in turn first.

    Args:
        prefill: from where the prompt would come; the link counts.
        decodes: of its page layout, `best` among them.
    """
    most_s = _micro(best.total_s + further_link_s(prefill, best.node, question) + noise_s(best.total_s))
    near = [
        one
        for one in decodes
        if one.must_evict == best.must_evict
        and _micro(one.total_s + further_link_s(prefill, one.node, question)) <= most_s
    ]
    least = max(question.usable(one.node) for one in near) - question.prompt_tokens // _PROMPT_SHARE
    return sorted(
        (one for one in near if question.usable(one.node) >= least),
        key=lambda one: (
            num_requests(one.node, question),
            question.load(one.node).turn,
            _micro(one.total_s),
            one.node.incarnation.name,
        ),
    )


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """What `near_equals` looks at, of all nodes of a large fleet at once."""

    row: Mapping[Incarnation, int]
    rows: Mapping[bytes, Ints]  # of the decode nodes that can take the request, by page layout
    total_s: Floats  # as of `decode_score`
    must_evict: Mask
    usable: Ints
    requests: Ints
    turn: Ints
    relay_token_s: Floats
    by_name: Ints  # place of each node's name among all

    def near_equals(self, prefill: NodeView, best: Score, question: Question, *, most: int) -> list[int]:
        """Return the rows of the first `most` that `near_equals` finds."""
        at = self.row[best.node.incarnation]
        rows = self.rows[prefill.layout_fingerprint]
        rows = rows[self.must_evict[rows] == self.must_evict[at]]
        total_s = self.total_s[rows] + self._further_link_s(prefill, rows, question)
        most_s = best.total_s + further_link_s(prefill, best.node, question) + noise_s(best.total_s)
        is_near = np.rint(total_s * 1e6) <= _micro(most_s)
        rows = rows[is_near]
        has = self.usable[rows] >= self.usable[rows].max() - question.prompt_tokens // _PROMPT_SHARE
        rows = rows[has]
        micro = np.rint(self.total_s[rows] * 1e6)
        in_turn: list[int] = rows[
            np.lexsort((self.by_name[rows], micro, self.turn[rows], self.requests[rows]))
        ].tolist()
        return in_turn[:most]

    def _further_link_s(self, prefill: NodeView, rows: Ints, question: Question) -> Floats | float:
        if not question.usual_link_s:
            return 0.0
        token_s = np.full(len(self.total_s), prefill.other_link_s or question.usual_link_s)
        for node, row in self.row.items() if prefill.links else ():
            token_s[row] = prefill.links.get(node.name) or token_s[row]
        further_s: Floats = (question.prompt_tokens - self.usable[rows]) * (token_s[rows] - self.relay_token_s[rows])
        return further_s


def num_requests(node: NodeView, question: Question) -> int:
    """Return how many requests a decode node has, as far as is known here."""
    return max(node.active_requests, question.load(node).requests)


def why_first(near: Sequence[Score], question: Question) -> str:
    """Return why the first of near equals goes first; empty when it is the only one."""
    if len(near) < 2:
        return ""
    first, second = near[0].node, near[1].node
    if num_requests(first, question) < num_requests(second, question):
        why = "it has fewer requests"
    elif question.load(first).turn < question.load(second).turn:
        why = "its latest request is longer ago"
    else:
        why = "nobody has fewer requests, or none for longer"
    return f"within noise of the best, shared: {why}"


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
