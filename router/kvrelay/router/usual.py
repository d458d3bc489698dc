"""What is assumed of a node that has measured nothing yet: what is usual among its like. Pure.

A fixed default is nearly always better or worse than every node of the fleet, so that a newcomer would get all
requests, or none, until it has measured itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrelay.core.types import Role
from kvrelay.router.cost import NodeCost, compute_s, step_s

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

_PROMPT_TOKENS = 4096  # nodes are compared by a prompt of this length
_SEQUENCES, _CONTEXT_TOKENS = 8, 8 * 4096  # ... or by a decode step of so much


def usual_link_s(nodes: Iterable[NodeView]) -> float:
    """Return the median time per relayed token of all links that were measured; 0 when none was."""
    measured = [one for node in nodes for one in node.links.values()]
    return statistics.median(measured) if measured else 0.0


def with_usual_costs(nodes: Sequence[NodeView]) -> list[NodeView]:
    """Return the nodes; those that have measured nothing get the cost of the median node among those that have.

    The median is that of the same role, model, dtype and ring size, else of the same role; with none the node keeps
    its defaults. Such a cost does not count as measured.
    """
    measured = [node for node in nodes if node.cost.is_measured]
    if len(measured) == len(nodes) or not measured:
        return list(nodes)
    alike = _medians(measured, _kind)
    of_role = _medians(measured, lambda node: node.role)
    return [
        node if node.cost.is_measured else replace(node, cost=_assumed(node, alike.get(_kind(node)), of_role))
        for node in nodes
    ]


def _assumed(node: NodeView, alike: NodeCost | None, of_role: dict[object, NodeCost]) -> NodeCost:
    usual = alike or of_role.get(node.role)
    return node.cost if usual is None else replace(usual, is_measured=False)


def _kind(node: NodeView) -> object:
    return node.role, node.model, node.dtype, node.ring_size


def _medians(nodes: Iterable[NodeView], key: Callable[[NodeView], object]) -> dict[object, NodeCost]:
    """Return the cost of a real node for each kind: coefficients fitted together are used together."""
    groups: dict[object, list[NodeView]] = {}
    for node in nodes:
        groups.setdefault(key(node), []).append(node)
    return {kind: sorted(group, key=_typical_s)[(len(group) - 1) // 2].cost for kind, group in groups.items()}


def _typical_s(node: NodeView) -> float:
    if node.role is Role.DECODE:
        return step_s(node.cost, sequences=_SEQUENCES, context_tokens=_CONTEXT_TOKENS)
    return compute_s(node.cost, tokens=_PROMPT_TOKENS, cached=0, ring_size=node.ring_size, break_even_tokens=1)
