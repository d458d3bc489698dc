"""Who keeps which request alive. Checked on a thread of its own, so that no busy thread can starve it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.types import Incarnation


@dataclass(slots=True)
class _Lease:
    request_id: str
    holder: Incarnation
    ends_s: float


class Leases:
    """Requests by key, each kept by one holder that must renew in time. Safe from any thread."""

    def __init__(self, *, lease_s: float, on_expired: Callable[[str, str], None], clock: Clock = monotonic) -> None:
        """
        Args:
            on_expired: called with (key, reason), on the thread that calls `check`.
        """
        self.lease_s = lease_s
        self._on_expired = on_expired
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    def open(self, key: str, *, request_id: str, holder: Incarnation) -> None:
        with self._lock:
            self._leases[key] = _Lease(request_id, holder, self._clock() + self.lease_s)

    def close(self, key: str) -> None:
        """Forget a request; unknown ones are ignored."""
        with self._lock:
            self._leases.pop(key, None)

    def holds(self, key: str) -> bool:
        """Say whether a request has a lease that has not run out."""
        with self._lock:
            return key in self._leases

    def renew(self, holder: Incarnation, request_ids: Iterable[str]) -> list[str]:
        """Extend the leases of one holder; return the request ids that are not its own or not here."""
        listed = set(request_ids)
        with self._lock:
            for lease in self._leases.values():
                if lease.holder == holder and lease.request_id in listed:
                    lease.ends_s = self._clock() + self.lease_s
            known = {lease.request_id for lease in self._leases.values() if lease.holder == holder}
        return sorted(listed - known)

    def check(self) -> None:
        """End every request whose holder has been silent for too long."""
        now_s = self._clock()
        with self._lock:
            expired = {key: lease for key, lease in self._leases.items() if lease.ends_s <= now_s}
            for key in expired:
                del self._leases[key]
        for key, lease in expired.items():
            self._on_expired(key, f"holder {lease.holder} did not renew within {self.lease_s:g} s")
