"""Which nodes serve a request: filter, score, pick. Pure; every node that is left out has a reason.

The cost of a prefill node is the work ahead of the request's first token there, in tokens of one rank. Long remainders
are shared by the ring; for short ones a ring is a waste, and they pay for each further rank. A decode node costs its
running sequences and the tokens that have to be relayed to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvrelay.core.errors import InvalidRequestError, UnavailableError
from kvrelay.core.types import Incarnation, Role

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

# A token that this request computes weighs more than one it waits for: it also keeps everybody behind it waiting. So a
# burst that shares a prefix waits for it in one place rather than computing it in each.
OWN_WORK_WEIGHT = 2
RELAY_TOKENS_PER_SEQUENCE = 4096  # relaying so many tokens weighs as much as one more running sequence


@dataclass(frozen=True, slots=True)
class Load:
    """What this router has on a node now. Newer than the node's heartbeat; the larger of the two counts."""

    requests: int = 0
    tokens: int = 0  # prompt tokens to compute
    pages: int = 0


NO_LOAD = Load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a placement depends on, besides the nodes."""

    prompt_tokens: int
    total_tokens: int  # prompt and longest output
    needs_decode: bool
    long_prompt_tokens: int
    cached_tokens: Mapping[Incarnation, int] = field(default_factory=dict)  # of the prompt, per node that has any
    loads: Mapping[Incarnation, Load] = field(default_factory=dict)
    avoid: frozenset[Incarnation] = frozenset()

    def remaining(self, node: NodeView) -> int:
        """Return the prompt tokens that a node must compute or get: never less than the last one."""
        usable = min(self.cached_tokens.get(node.incarnation, 0), self.prompt_tokens - 1)
        return self.prompt_tokens - usable // node.page_tokens * node.page_tokens

    def load(self, node: NodeView) -> Load:
        return self.loads.get(node.incarnation, NO_LOAD)

    def pages(self, node: NodeView) -> int:
        """Return the pages that the request takes of a node."""
        num_tokens = self.prompt_tokens if node.role is Role.PREFILL else self.total_tokens
        return -(-num_tokens // node.page_tokens)


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request goes."""

    prefill: NodeView
    decode: NodeView | None  # None when nothing is to be decoded
    remaining_tokens: int  # that prefill has to compute
    refused: Mapping[str, str]  # node name -> why it was left out


def usable_groups(nodes: Iterable[NodeView]) -> list[list[NodeView]]:
    """Return the nodes of each page layout that has both a prefill and a decode node."""
    groups: dict[bytes, list[NodeView]] = {}
    for node in nodes:
        groups.setdefault(node.layout_fingerprint, []).append(node)
    return [group for group in groups.values() if {node.role for node in group} == set(Role)]


def missing_for_service(nodes: Sequence[NodeView]) -> str | None:
    """Return what the nodes lack to serve anything, or None."""
    absent = [role.value for role in Role if not any(node.role is role for node in nodes)]
    if absent:
        return f"no {' and no '.join(absent)} node takes requests"
    return None if usable_groups(nodes) else "no prefill and decode node have the same page layout"


def longest_served(nodes: Iterable[NodeView]) -> int:
    """Return the longest prompt plus output that some usable pair takes; 0 without a pair."""
    per_group = (
        min(max(node.max_model_len for node in group if node.role is role) for role in Role)
        for group in usable_groups(nodes)
    )
    return max(per_group, default=0)


def place(nodes: Sequence[NodeView], question: Question) -> Pair:
    """Choose the prefill and the decode node of a request together: both of one layout.

    Raises:
        InvalidRequestError: no node could ever hold the request; names the pages.
        UnavailableError: no node can take it now; names every node and why not.
    """
    refused = {node.incarnation: why for node in nodes if (why := _refusal(node, question)) is not None}
    left = [node for node in nodes if node.incarnation not in refused]
    choices: list[tuple[NodeView, NodeView | None]] = []
    for layout in sorted({node.layout_fingerprint for node in left}):
        group = [node for node in left if node.layout_fingerprint == layout]
        prefill = _cheapest((node for node in group if node.role is Role.PREFILL), question)
        decode = _cheapest((node for node in group if node.role is Role.DECODE), question)
        if prefill is not None and (decode is not None or not question.needs_decode):
            choices.append((prefill, decode if question.needs_decode else None))
    names = {node.incarnation.name: refused[node.incarnation] for node in nodes if node.incarnation in refused}
    if not choices:
        raise _none_left(nodes, question, names)
    prefill, decode = min(choices, key=lambda pair: _order(pair[0], question))
    return Pair(prefill, decode, question.remaining(prefill), names)


def prefill_cost(node: NodeView, question: Question) -> float:
    """Return the work ahead on a prefill node, in tokens of one rank."""
    waiting = max(node.queued_tokens, question.load(node).tokens)
    remaining = question.remaining(node)
    if remaining >= question.long_prompt_tokens:
        return (waiting + OWN_WORK_WEIGHT * remaining) / node.ring_size
    further_ranks = (node.ring_size - 1) * question.long_prompt_tokens
    return waiting / node.ring_size + OWN_WORK_WEIGHT * (remaining + further_ranks)


def decode_cost(node: NodeView, question: Question) -> float:
    """Return the load of a decode node with this request, in running sequences."""
    active = max(node.active_requests, question.load(node).requests)
    return active + question.remaining(node) / RELAY_TOKENS_PER_SEQUENCE


def _cheapest(nodes: Iterable[NodeView], question: Question) -> NodeView | None:
    return min(nodes, key=lambda node: _order(node, question), default=None)


def _order(node: NodeView, question: Question) -> tuple[bool, float, int, str]:
    """Order nodes of one role: those that need not evict for it first, then least cost, least busy, name."""
    load = question.load(node)
    active = max(node.active_requests, load.requests)
    if node.role is Role.PREFILL:
        return False, prefill_cost(node, question), active, node.incarnation.name
    must_evict = node.free_pages - load.pages < question.pages(node)
    return must_evict, decode_cost(node, question), active, node.incarnation.name


def _refusal(node: NodeView, question: Question) -> str | None:
    """Return why a node cannot take the request, or None."""
    if node.incarnation in question.avoid:
        return "failed this request before"
    if node.draining:
        return "is draining"
    if node.max_model_len < question.total_tokens:
        return f"takes {node.max_model_len} tokens, the request may reach {question.total_tokens}"
    if question.pages(node) > node.total_pages:
        return f"has {node.total_pages} pages, the request needs {question.pages(node)}"
    return None


def _none_left(
    nodes: Sequence[NodeView], question: Question, refused: Mapping[str, str]
) -> InvalidRequestError | UnavailableError:
    for role in (Role.PREFILL, Role.DECODE) if question.needs_decode else (Role.PREFILL,):
        of_role = (node for node in nodes if node.role is role)
        largest = max(of_role, key=lambda node: node.total_pages, default=None)
        if largest is not None and question.pages(largest) > largest.total_pages:
            return InvalidRequestError(
                f"the request needs {question.pages(largest)} pages of {largest.page_tokens} tokens; "
                f"the largest {role.value} node has {largest.total_pages}"
            )
    reasons = "; ".join(f"{name} {why}" for name, why in sorted(refused.items()))
    missing = missing_for_service(nodes) or reasons or "what is left has different page layouts"
    return UnavailableError(f"no nodes can take the request: {missing}")
