"""How fast writes to one peer go: bytes over the time in which at least one was on its way; and over what."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.types import LinkState

_LEAST_BYTES = 1 << 20  # what is smaller measures the start and not the link
_GAIN = 0.2
ROUTE_KNOWN_S = 900.0  # after its last use; nobody tells a writer that an idle peer has gone


@dataclass(slots=True)
class LinkMeter:
    """Owned by the transfer thread; `bytes_per_s` may be read by any."""

    bytes_per_s: float = 0.0  # 0 = not known yet
    route: str = ""  # see `Transport.route`
    is_expected: bool = True  # the route is
    was_told: bool = False  # route and speed are in the log
    used_s: float = 0.0  # when something was last on its way
    _in_flight: int = 0
    _since_s: float = 0.0
    _bytes: int = 0
    _busy_s: float = 0.0

    def state(self, now_s: float) -> LinkState:
        """Return what is known of the link; its route is not when the peer may have gone in the meantime."""
        age_s = max(0.0, now_s - self.used_s)
        if age_s >= ROUTE_KNOWN_S:
            return LinkState(self.bytes_per_s, "", is_expected=True, age_s=age_s)
        return LinkState(self.bytes_per_s, self.route, self.is_expected, age_s)

    def posted(self, now_s: float) -> None:
        """A write is about to begin."""
        if self._in_flight == 0:
            self._since_s = now_s
        self._in_flight += 1
        self.used_s = now_s

    def ended(self, num_bytes: int, now_s: float) -> None:
        """A write has landed, with this many bytes, or has failed, with none."""
        self._in_flight -= 1
        self.used_s = now_s
        self._bytes += num_bytes
        if self._in_flight:
            return
        self._busy_s += now_s - self._since_s
        if self._bytes >= _LEAST_BYTES and self._busy_s > 0.0:
            rate = self._bytes / self._busy_s
            self.bytes_per_s = rate if not self.bytes_per_s else (1 - _GAIN) * self.bytes_per_s + _GAIN * rate
            self._bytes, self._busy_s = 0, 0.0
