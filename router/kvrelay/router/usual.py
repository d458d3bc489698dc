"""What is assumed of a node that has measured nothing, or nothing for long: what is usual among its like. Pure.

A fixed default is nearly always better or worse than every node of the fleet, so that a newcomer would get all
requests, or none, until it has measured itself. And a node that once measured itself far too slow gets none, so that it
never finds out: what it said fades towards what is usual, until it is tried again. It fades by the time in which others
went on to measure: in a fleet that idles nobody is forgotten.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvrelay.core.types import Role
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.cost import NodeCost, belief, compute_s, step_s

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

_PROMPT_TOKENS = 4096  # nodes are compared by a prompt of this length
_SEQUENCES, _CONTEXT_TOKENS = 8, 8 * 4096  # ... or by a decode step of so much
_LOCAL_TOKENS = 128  # ... or by so much of a prompt that a decode node computes
_FRESH = 0.98  # what is believed so much is left as it is
_LINK_OBSERVATIONS = 80  # a link's speed is believed as long as a fit to so many

_PREFILL = ("start_s", "token_s", "pair_s")
_DECODE = ("step_s", "sequence_s", "context_token_s")


@dataclass(frozen=True, slots=True)
class UsualLinks:
    """What links take per relayed token."""

    token_s: float = 0.0  # median of all links that nodes tell of, 0 when none was measured
    age_s: float = 0.0  # of the one used last

    @classmethod
    def of(cls, records: Iterable[fleet_pb2.NodeRecord]) -> UsualLinks:
        measured = [(link.token_s, link.age_s) for one in records for link in one.links if link.token_s > 0.0]
        if not measured:
            return cls()
        return cls(statistics.median(token_s for token_s, _ in measured), min(age_s for _, age_s in measured))

    def believed_s(self, link: fleet_pb2.Link) -> float:
        """Return what a link takes: as it was measured, and the longer it was left out the more as is usual."""
        share = belief(link.age_s - self.age_s, _LINK_OBSERVATIONS)
        if share > _FRESH or not self.token_s:
            return link.token_s
        return math.exp(share * math.log(link.token_s) + (1 - share) * math.log(self.token_s))


NO_LINKS = UsualLinks()


def with_usual_costs(nodes: Sequence[NodeView]) -> list[NodeView]:
    """Return the nodes; those that have measured nothing get the cost of the median node among those that have.

    The median is that of the same role, model, dtype and ring size, else of the same role; with none the node keeps
    its defaults. Such a cost does not count as measured. What was measured long before others measured themselves is
    moved towards that median.
    """
    found = list(nodes)
    for of_role in (_OF_PREFILL, _OF_STEPS, _OF_LOCAL):
        at = [number for number, node in enumerate(found) if node.role is of_role.role]
        measured = [node for node in (found[number] for number in at) if of_role.is_measured(node)]
        if measured:
            usual = _Usual(of_role, measured)
            for number in at:
                found[number] = usual.applied(found[number])
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Coefficients that a node measures together."""

    role: Role
    names: tuple[str, ...]
    typical_s: Callable[[NodeView, NodeCost], float]
    is_local: bool = False  # of a decode node: what it computes of prompts

    def is_measured(self, node: NodeView) -> bool:
        return node.cost.is_measured_local if self.is_local else node.cost.is_measured

    def age_s(self, node: NodeView) -> float:
        return node.cost.local_age_s if self.is_local else node.cost.age_s

    def observations(self, node: NodeView) -> int:
        return node.cost.local_observations if self.is_local else node.cost.observations


def _prompt_s(node: NodeView, cost: NodeCost) -> float:
    return compute_s(cost, tokens=_PROMPT_TOKENS, cached=0, ring_size=node.ring_size, break_even_tokens=1)


def _step_s(_: NodeView, cost: NodeCost) -> float:
    return step_s(cost, sequences=_SEQUENCES, context_tokens=_CONTEXT_TOKENS)


def _local_s(_: NodeView, cost: NodeCost) -> float:
    return compute_s(cost, tokens=_LOCAL_TOKENS, cached=_PROMPT_TOKENS, ring_size=1, break_even_tokens=1)


_OF_PREFILL = _Part(Role.PREFILL, _PREFILL, _prompt_s)
_OF_STEPS = _Part(Role.DECODE, _DECODE, _step_s)
_OF_LOCAL = _Part(Role.DECODE, _PREFILL, _local_s, is_local=True)


@dataclass(slots=True)
class _Kind:
    """Nodes that are alike."""

    sized: list[tuple[float, float, NodeView]] = field(default_factory=list)  # typical time, belief, node

    def middle(self) -> NodeView:
        """Return the median node, counted by how much each is believed: a real one, since coefficients fitted
        together are used together."""
        self.sized.sort(key=lambda one: one[0])
        left = sum(share for _, share, _ in self.sized) / 2
        for _, share, node in self.sized:
            left -= share
            if left <= 1e-12:
                return node
        return self.sized[-1][2]


class _Usual:
    """What is usual of one part of the cost."""

    def __init__(self, part: _Part, measured: Sequence[NodeView]) -> None:
        self._part = part
        self._least_age_s = min(map(part.age_s, measured))
        kinds: dict[object, _Kind] = {}
        of_role = _Kind()
        for node in measured:
            one = part.typical_s(node, node.cost), self._share(node), node
            of_role.sized.append(one)
            kinds.setdefault(_kind(node), _Kind()).sized.append(one)
        self._of_role = of_role.middle()
        self._alike = {kind: group.middle() for kind, group in kinds.items()}
        self._lonely = {kind for kind, group in kinds.items() if len(group.sized) == 1}  # kinds of one node

    def applied(self, node: NodeView) -> NodeView:
        """Return a node as it is to be taken."""
        part, kind = self._part, _kind(node)
        if part.is_measured(node):
            # The only one of its kind is compared with its role: there is nobody else.
            usual = self._of_role if kind in self._lonely else self._alike[kind]
            return self._faded(node, usual)
        if part.is_local:
            return node  # until it says more, a prefill node's speed stands for it
        return replace(node, cost=replace(self._alike.get(kind, self._of_role).cost, is_measured=False))

    def _share(self, node: NodeView) -> float:
        return belief(self._part.age_s(node) - self._least_age_s, self._part.observations(node))

    def _faded(self, node: NodeView, usual: NodeView) -> NodeView:
        """Return a node whose coefficients are its own by the share that is believed: in size by the geometric mean,
        which forgets a fit that is ten times too slow as soon as one that is ten times too fast; in shape by the mean.
        """
        part, share = self._part, self._share(node)
        if share > _FRESH or usual.incarnation == node.incarnation:
            return node
        own_s, usual_s = part.typical_s(node, node.cost), part.typical_s(node, usual.cost)
        if own_s <= 0.0 or usual_s <= 0.0:
            return node
        size_s = math.exp(share * math.log(own_s) + (1 - share) * math.log(usual_s))
        of_own, of_usual = size_s * share / own_s, size_s * (1 - share) / usual_s
        mixed = {name: of_own * getattr(node.cost, name) + of_usual * getattr(usual.cost, name) for name in part.names}
        return replace(node, cost=replace(node.cost, **mixed))


def _kind(node: NodeView) -> object:
    return node.role, node.model, node.dtype, node.latent_format, node.ring_size
