"""What this router has learned of each node's speed. Pure; bounded by the nodes that are there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.types import Incarnation, Role
from kvrelay.router.cost import Correction, belief

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView


class Learned:
    """Corrections of published costs, by node."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._latest_s = clock()  # when anything was learned: what was not renewed for long before that fades
        self._prefill: dict[Incarnation, Correction] = {}
        self._measured: set[Incarnation] = set()  # nodes that publish costs of their own
        self._usual_log_scale = 0.0  # of nodes of which nothing was seen

    def observe_prefill(self, node: Incarnation, *, predicted_s: float, observed_s: float) -> None:
        """Learn from a prefill that had its node to itself.

        Args:
            predicted_s: as the corrected costs said.
        """
        correction = self._prefill.get(node)
        if correction is None:  # it was predicted with what is usual
            correction = self._prefill[node] = Correction(log_scale=self._usual_log_scale)
        # What it was predicted with had faded since: it is learned from there on.
        correction.log_scale = self._log_scale(correction)
        correction.observe(predicted_s=predicted_s / correction.scale, observed_s=observed_s)
        correction.at_s = self._latest_s = self._clock()

    def is_proven(self, node: Incarnation) -> bool:
        """Say whether enough was seen of a node to refuse a request on what its costs say."""
        correction = self._prefill.get(node)
        return node in self._measured or (correction is not None and correction.observations >= 3)

    def corrected(self, nodes: Iterable[NodeView]) -> tuple[NodeView, ...]:
        """Return the nodes with costs as they have shown themselves to be; forgets the nodes that are gone.

        A node of which nothing was seen yet is taken to be as far off as the others are.
        """
        nodes = tuple(nodes)
        here = {node.incarnation for node in nodes}
        for gone in [one for one in self._prefill if one not in here]:
            del self._prefill[gone]
        # One that has taken another role has not measured itself in it.
        self._measured &= {node.incarnation for node in nodes if node.cost.is_measured}
        for node in nodes:
            if node.cost.is_measured and node.incarnation not in self._measured:
                self._measured.add(node.incarnation)
                self._prefill.pop(node.incarnation, None)  # it corrected what was assumed until now
        # With one that says nothing among them, so that a single node decides little.
        self._usual_log_scale = statistics.median([0.0, *map(self._log_scale, self._prefill.values())])
        return tuple(self.correct(node) for node in nodes)

    def correct(self, node: NodeView) -> NodeView:
        """Return one of the nodes that `corrected` was last given, with its present cost."""
        if node.role is not Role.PREFILL:
            return node
        correction = self._prefill.get(node.incarnation)
        cost = node.cost
        scale = math.exp(self._usual_log_scale if correction is None else self._log_scale(correction))
        if scale == 1.0:
            return node
        scaled = replace(cost, start_s=cost.start_s * scale, token_s=cost.token_s * scale, pair_s=cost.pair_s * scale)
        return replace(node, cost=scaled)

    def _log_scale(self, correction: Correction) -> float:
        """Return what is believed of a correction now; one that nothing has proven for long is as usual.

        A node that was once seen to be slow gets no requests by which it could show that it is not.
        """
        share = belief(self._latest_s - correction.at_s, correction.observations)
        return share * correction.log_scale + (1 - share) * self._usual_log_scale
