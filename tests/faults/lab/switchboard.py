"""The fault points of one process: armed by name at run time, asked by the seams, counted when they strike."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Rule:
    """When an armed point strikes, and what it does."""

    kind: str
    skip: int = 0  # passes that go by unharmed first
    count: int = 1 << 30  # strikes before the rule is spent
    share: float = 1.0  # of the passes, chosen by the seed
    seed: int = 0
    seconds: float = 0.0  # what it means is the seam's business
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def strikes(self) -> bool:
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.count <= 0 or self.dice.random() >= self.share:
            return False
        self.count -= 1
        return True


class Switchboard:
    """One rule per point. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: dict[str, Rule] = {}
        self.hits: Counter[str] = Counter()
        self.on_forgive: list[Callable[[], object]] = []  # lets what this process remembers of faults be forgotten

    def arm(self, point: str, **rule: Any) -> None:
        with self._lock:
            self._rules[point] = Rule(**rule)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def forgive(self) -> None:
        for forget in self.on_forgive:
            forget()

    def ask(self, point: str) -> Rule | None:
        """Pass a point; the rule is returned when it strikes."""
        with self._lock:
            rule = self._rules.get(point)
            if rule is None or not rule.strikes():
                return None
            self.hits[f"{point}:{rule.kind}"] += 1
            return rule

    def armed(self, point: str) -> bool:
        with self._lock:
            return point in self._rules

    def linger(self, point: str) -> None:
        """Wait as long as an armed point says, or until it is cleared."""
        rule = self.ask(point)
        if rule is None:
            return
        until_s = time.monotonic() + rule.seconds
        while time.monotonic() < until_s and self.armed(point):
            time.sleep(0.01)
