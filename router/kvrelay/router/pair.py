"""What a placement says: the nodes of a request, and why it is these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvrelay.router.fetch import Pull
from kvrelay.router.score import NO_LOAD, Load, Score, promised_wait_s

if TYPE_CHECKING:
    from kvrelay.core.types import Incarnation
    from kvrelay.router.fleet import NodeView


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request goes."""

    prefill: NodeView
    decode: NodeView | None  # None when nothing is to be decoded
    remaining_tokens: int  # that prefill has to compute
    refused: Mapping[str, str]  # node name -> why it was left out
    work_s: float = field(default=0.0, compare=False)  # predicted time of computing them
    # Of every node that was not left out; of a large fleet's, of the best ones.
    scores: tuple[Score, ...] = field(default=(), compare=False)
    local: Score | None = field(default=None, compare=False)  # set: the decode node computes what is missing itself
    way: str = field(default="", compare=False)  # how the prompt gets to the decode node, and why so
    pull: Pull | None = field(default=None, compare=False)  # set: prefill fetches so much instead of computing it
    # Set: it does if it has not yet what is on its way there.
    late_pull: Pull | None = field(default=None, compare=False)
    load: Load = field(default=NO_LOAD, compare=False)  # of the prefill node
    near: frozenset[Incarnation] = field(default=frozenset(), compare=False)  # decode nodes that were as good, and
    why_shared: str = field(default="", compare=False)  # why of several it is this one
    best_step_s: float = field(default=0.0, compare=False)  # of the one that costs least, see `step_s`

    def backlog_s(self) -> float:
        """Return the predicted time of what goes before it."""
        if self.local is not None:
            return self.local.parts["wait_s"]
        compute_s = next((one.parts["compute_s"] for one in self.scores if one.node is self.prefill), 0.0)
        return promised_wait_s(self.prefill, self.load, compute_s)

    def step_s(self) -> float:
        """Return the predicted time of a decode step with this request in it; 0 without a decode node.

        A node within noise of the best is no slower than it as far as is known. And one that is refused takes no turn:
        were it refused by what its own fit says, all that follow would be too, beside a node that can take them.
        """
        own_s = next((one.step_s for one in self.scores if one.node is self.decode), 0.0)
        return min(own_s, self.best_step_s) if self.near else own_s
