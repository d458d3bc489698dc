"""What landed in our pages: notices matched with the epochs we wait for, and their bytes compared with checksums.

Lives on the transfer thread of a reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.core.clock import Clock
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer import notice as notices
from kvrelay.kv_transfer.notice import Notice, NoticeKey
from kvrelay.kv_transfer.session_events import PartLanded
from kvrelay.kv_transfer.values import Part

Verify = Callable[[Part], bool]  # compares the landed bytes with the part's checksum; False also for impossible parts
OnLanded = Callable[[tuple[PartLanded, ...]], None]


@dataclass(frozen=True, slots=True)
class Expected:
    """One epoch whose parts may come."""

    agents: tuple[str, ...]  # the only writers, by rank
    verify: Verify
    on_landed: OnLanded


class Landings:
    """Not locked: the transfer thread owns it."""

    def __init__(self, counters: Counters, clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        self._expected: dict[NoticeKey, Expected] = {}
        self._backlog: deque[tuple[str, Notice, float]] = deque()  # agent, notice, when it came in

    @property
    def open_epochs(self) -> int:
        return len(self._expected)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def expect(self, key: NoticeKey, expected: Expected) -> None:
        self._expected[key] = expected

    def forget(self, key: NoticeKey) -> None:
        """Every further notice of this epoch is stale."""
        self._expected.pop(key, None)

    def take(self, incoming: Sequence[tuple[str, bytes]]) -> None:
        """Note what came in; `work` looks at it."""
        now_s = self._clock()
        for agent, raw in incoming:
            try:
                self._backlog.append((agent, notices.decode(raw), now_s))
            except InvalidRequestError:
                self._counters.add("notices_garbled_total")

    def work(self, *, budget_s: float) -> None:
        """Verify parts in the order they landed, for about `budget_s`, so that polling goes on in between."""
        until_s = self._clock() + budget_s
        found: dict[NoticeKey, list[PartLanded]] = {}
        while self._backlog:
            agent, notice, landed_at_s = self._backlog.popleft()
            expected = self._expected.get(notice.key)
            if expected is None or notice.rank >= len(expected.agents) or expected.agents[notice.rank] != agent:
                self._counters.add("notices_stale_total")
                continue
            verified = expected.verify(notice.part)
            self._counters.add("parts_verified_total" if verified else "parts_corrupt_total")
            now_s = self._clock()
            landed = PartLanded(notice.rank, notice.part, verified, landed_at_s, now_s)
            found.setdefault(notice.key, []).append(landed)
            if now_s >= until_s:
                break
        for key, parts in found.items():
            self._expected[key].on_landed(tuple(parts))
