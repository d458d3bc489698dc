"""How many nodes of each role the load needs. Pure: observations in, advice out.

More nodes are advised as soon as the mean load of the last `up_s` needs them, fewer only when it did at no time of
the last `down_s` (hysteresis): a load that comes and goes within `down_s` keeps its nodes. While a node is younger than
`warm_up_s` its pool does not shrink: its first, idle moments are no sign that there are too many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One node at one moment; `work` is prompt tokens that wait or are in work (prefill), or sequences (decode)."""

    name: str  # with its life, so that a restarted node warms up again
    role: str  # prefill or decode
    devices: int
    work: float


@dataclass(frozen=True, slots=True)
class Targets:
    """What the operator wants of a node, and what there is."""

    prefill_tokens: float = 32768.0  # prompt tokens that may wait or be in work per prefill node
    decode_sequences: float = 64.0  # sequences per decode node at which the time between tokens is still good
    devices: int = 0  # budget of both pools; 0 = none
    up_s: float = 15.0
    down_s: float = 300.0
    warm_up_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Advice:
    prefill: int
    decode: int
    short_of_devices: bool = False  # the load needs more than the budget has


@dataclass(slots=True)
class Advisor:
    """Call `observe` every few seconds with all nodes that serve."""

    targets: Targets
    _first_seen_s: dict[str, float] = field(default_factory=dict)
    _loads: deque[tuple[float, float, float]] = field(default_factory=deque)  # of up_s: when, prefill, decode, in nodes
    _needs: deque[tuple[float, int, int]] = field(default_factory=deque)  # of down_s: when, nodes of each pool
    _had: tuple[int, int] = (1, 1)

    def observe(self, now_s: float, nodes: Sequence[NodeLoad]) -> Advice:
        """Take in one moment and return what is needed now."""
        targets = self.targets
        self._first_seen_s = {node.name: self._first_seen_s.get(node.name, now_s) for node in nodes}
        work = [sum(node.work for node in nodes if node.role == role) for role in ("prefill", "decode")]
        self._loads.append((now_s, work[0] / targets.prefill_tokens, work[1] / targets.decode_sequences))
        while self._loads[0][0] < now_s - targets.up_s:
            self._loads.popleft()
        prefill = sum(load[1] for load in self._loads) / len(self._loads)
        decode = sum(load[2] for load in self._loads) / len(self._loads)
        self._needs.append((now_s, max(1, math.ceil(prefill)), max(1, math.ceil(decode))))
        while self._needs[0][0] < now_s - targets.down_s:
            self._needs.popleft()
        wanted = tuple(self._of_pool(now_s, pool, nodes) for pool in (0, 1))
        self._had = wanted[0], wanted[1]
        return self._within_budget(wanted[0], wanted[1], nodes)

    def _of_pool(self, now_s: float, pool: int, nodes: Sequence[NodeLoad]) -> int:
        role = ("prefill", "decode")[pool]
        history = [need[1] if pool == 0 else need[2] for need in self._needs]
        now_needed = history[-1]
        here = [node for node in nodes if node.role == role]
        have = max(self._had[pool], len(here))
        if now_needed >= have:
            return now_needed
        warm = all(now_s - self._first_seen_s[node.name] >= self.targets.warm_up_s for node in here)
        watched = now_s - self._needs[0][0] >= self.targets.down_s * 0.95
        if not (warm and watched):
            return have
        return min(have, max(history))

    def _within_budget(self, prefill: int, decode: int, nodes: Sequence[NodeLoad]) -> Advice:
        """Cut prefill first: prompts then wait, while decode without room refuses them."""
        budget = self.targets.devices
        per_prefill = max((node.devices for node in nodes if node.role == "prefill"), default=1)
        if not budget or prefill * per_prefill + decode <= budget:
            return Advice(prefill, decode)
        cut = max(1, (budget - decode) // per_prefill)
        return Advice(cut, max(1, min(decode, budget - cut * per_prefill)), short_of_devices=True)
