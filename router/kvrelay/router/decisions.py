"""Why requests went where they went: the latest decisions, in bounded memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.core.types import Role
from kvrelay.index.reader import Confidence
from kvrelay.proto.v1 import fleet_pb2
from kvrelay.router.placement import Pair

MAX_DECISIONS = 4096
_MAX_NAMED = 1 << 17  # nodes in all decisions together, at some 300 B each


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that was looked at."""

    name: str
    role: Role
    ring_size: int
    cached_tokens: int
    total_s: float
    parts: Mapping[str, float]
    verdict: str  # "chosen", or why not


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement; a request that was placed again has the latest one."""

    prompt_tokens: int
    confidence: Confidence
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, str]  # nodes that were left out, and why
    way: str = ""  # how the prompt gets to the decode node, and why so

    @property
    def num_named(self) -> int:
        """How many nodes it says something about."""
        return len(self.candidates) + len(self.refused)


class DecisionLog:
    """The latest `max_decisions` decisions by request, and how sure the index was, counted since start.

    They are fewer when they name more than `max_named` nodes: in a large fleet each may say why hundreds are left out.
    """

    def __init__(self, max_decisions: int = MAX_DECISIONS, max_named: int = _MAX_NAMED) -> None:
        self._max_decisions, self._max_named = max_decisions, max_named
        self._num_named = 0
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self.confidences: Counter[Confidence] = Counter()

    def __len__(self) -> int:
        return len(self._decisions)

    def enter(self, request_id: str, decision: Decision) -> None:
        before = self._decisions.pop(request_id, None)
        self._decisions[request_id] = decision
        self._num_named += decision.num_named - (before.num_named if before else 0)
        while len(self._decisions) > self._max_decisions or self._num_named > self._max_named:
            _, oldest = self._decisions.popitem(last=False)
            self._num_named -= oldest.num_named

    def find(self, request_id: str) -> Decision | None:
        return self._decisions.get(request_id)


def explained(pair: Pair, *, prompt_tokens: int, confidence: Confidence, cached: Mapping[str, int]) -> Decision:
    """Return a placement with a reason for every node.

    Args:
        cached: tokens of the prompt by node name.
    """
    chosen = {pair.prefill.incarnation, *((pair.decode.incarnation,) if pair.decode else ())}
    best_s = {one.node.role: one.total_s for one in pair.scores if one.node.incarnation in chosen}
    local = pair.local
    candidates = []
    for scored in sorted(pair.scores, key=lambda score: (score.node.role.value, score.order)):
        one, node = scored, scored.node
        if local is not None and node is local.node:
            one, verdict = local, "chosen: computes what it lacks itself"
        elif local is not None and node.role is Role.PREFILL:
            verdict = f"not needed unless {local.node.incarnation.name} lacks more than was thought"
        elif node.incarnation in chosen:
            is_shared = node.role is Role.DECODE and pair.why_shared
            verdict = f"chosen: {pair.why_shared}" if is_shared else "chosen"
        elif one.must_evict:
            verdict = "would have to evict blocks"
        else:
            verdict = _beside(one.total_s - best_s.get(node.role, one.total_s))
            if node.incarnation in pair.near:
                verdict += ": within noise of the best, its turn comes later"
        tokens = cached.get(node.incarnation.name, 0)
        candidates.append(
            Candidate(node.incarnation.name, node.role, node.ring_size, tokens, one.total_s, one.parts, verdict)
        )
    return Decision(prompt_tokens, confidence, tuple(candidates), pair.refused, pair.way)


def _beside(more_s: float) -> str:
    if abs(more_s) < 1e-6:
        return "costs the same as the chosen one"
    return f"costs {abs(more_s):.3g} s {'more' if more_s > 0.0 else 'less'} than the chosen one"


def decision_to_pb(decision: Decision) -> fleet_pb2.ExplainReply:
    candidates = [
        fleet_pb2.Candidate(
            node=one.name,
            role=fleet_pb2.NODE_ROLE_PREFILL if one.role is Role.PREFILL else fleet_pb2.NODE_ROLE_DECODE,
            ring_size=one.ring_size,
            cached_tokens=one.cached_tokens,
            total_s=one.total_s,
            parts_s=dict(one.parts),
            verdict=one.verdict,
        )
        for one in decision.candidates
    ]
    return fleet_pb2.ExplainReply(
        prompt_tokens=decision.prompt_tokens,
        index_confidence=decision.confidence.value,
        candidates=candidates,
        refused=decision.refused,
        way=decision.way,
    )
