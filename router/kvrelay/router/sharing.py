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


def noise_s(cost_s: float) -> float:
    """Return by how much a decode node's cost, with the link to it, may be off."""
    return max(NOISE * cost_s, LEAST_NOISE_S)


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is among the decode nodes that are as good as the best one."""

    node: NodeView
    why: str = ""  # empty when no other one is as good
    near: frozenset[Incarnation] = frozenset()  # it and those others, as far as they are looked at


def whose_turn(prefill: NodeView, best: Score, decodes: Iterable[Score], question: Question) -> Turn:
    """Choose among the decode nodes that are as good as the best one as far as costs can tell.

    Args:
        prefill: from where the prompt would come; the link counts.
        decodes: of its page layout, `best` among them.
    """
    most_s = _most_s(prefill, best, question)
    near = [
        one
        for one in decodes
        if one.must_evict == best.must_evict
        and _micro(one.total_s + further_link_s(prefill, one.node, question)) <= most_s
    ]
    if len(near) > 1 and question.cached_tokens:
        least = max(question.usable(one.node) for one in near) - question.prompt_tokens // _PROMPT_SHARE
        near = [one for one in near if question.usable(one.node) >= least]
    if len(near) == 1:
        return Turn(near[0].node)
    (requests, turn, *_, node), second, *_ = sorted(_in_turn(one, question) for one in near)
    why = _why(fewest=requests < second[0], longest_ago=turn < second[1])
    return Turn(node, why, frozenset(one.node.incarnation for one in near))


def _in_turn(one: Score, question: Question) -> tuple[int, int, int, str, int, NodeView]:
    """Return what sorts near equals, and the node behind it; nodes themselves are never compared."""
    node, load = one.node, question.load(one.node)
    name = node.incarnation.name
    return max(node.active_requests, load.requests), load.turn, _micro(one.total_s), name, id(node), node


@dataclass(frozen=True, slots=True)
class DecodesInTurn:
    """What `whose_turn` looks at, of all decode nodes of one page layout of a large fleet at once."""

    nodes: Sequence[NodeView]  # of the roster
    rows: Ints  # of the decode nodes in it
    named: Mapping[str, list[int]]  # places among them by name; the lives of one node have one name
    total_s: Floats  # as of `decode_score`; infinite for nodes that cannot take the request
    must_evict: Mask
    usable: Ints
    requests: Ints
    turn: Ints
    relay_token_s: Floats
    by_name: Ints  # rank of each node's name
    few: Ints  # places that are looked at

    def whose_turn(self, prefill: NodeView, best: Score, question: Question) -> Turn:
        """Choose as `whose_turn` does among all nodes."""
        near = self._near(prefill, best, question)
        if len(near) == 1:
            return Turn(self._node(near[0]))
        requests = self.requests[near]
        fewest = near[requests == requests.min()]
        turn = self.turn[fewest]
        first = fewest[turn == turn.min()]
        why = _why(fewest=len(fewest) == 1, longest_ago=len(first) == 1)
        if len(first) > 1:
            first = first[np.lexsort((self.by_name[first], np.rint(self.total_s[first] * 1e6)))]
        is_near = np.zeros(len(self.rows), bool)
        is_near[near] = True
        looked_at = self.few[is_near[self.few]].tolist()
        return Turn(self._node(first[0]), why, frozenset(self._node(one).incarnation for one in (first[0], *looked_at)))

    def _node(self, place: int) -> NodeView:
        return self.nodes[int(self.rows[place])]

    def _near(self, prefill: NodeView, best: Score, question: Question) -> Ints:
        micro = np.rint((self.total_s + self._further_link_s(prefill, question)) * 1e6)
        is_near = (micro <= _most_s(prefill, best, question)) & (self.must_evict == best.must_evict)
        near: Ints = is_near.nonzero()[0]
        if question.cached_tokens:
            usable = self.usable[near]
            near = near[usable >= usable.max() - question.prompt_tokens // _PROMPT_SHARE]
        return near

    def _further_link_s(self, prefill: NodeView, question: Question) -> Floats | float:
        if not question.usual_link_s:
            return 0.0
        token_s = np.full(len(self.total_s), prefill.other_link_s or question.usual_link_s)
        for name, link_s in prefill.links.items():  # few are listed
            token_s[self.named.get(name, [])] = link_s
        further_s: Floats = (question.prompt_tokens - self.usable) * (token_s - self.relay_token_s)
        return further_s


def _most_s(prefill: NodeView, best: Score, question: Question) -> int:
    """Return up to which cost a node is as good as the best one, in microseconds."""
    cost_s = best.total_s + further_link_s(prefill, best.node, question)
    return _micro(cost_s + noise_s(cost_s))


def _why(*, fewest: bool, longest_ago: bool) -> str:
    if fewest:
        why = "it has fewer requests"
    elif longest_ago:
        why = "its latest request is longer ago"
    else:
        why = "nobody has fewer requests, or none for longer"
    return f"within noise of the best, shared: {why}"


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
