"""The links of one agent to the peers that it has written to: how fast, over what, and whether that is expected."""

from __future__ import annotations

import logging

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.types import Counters, LinkState
from kvrelay.kv_transfer.link_meter import LinkMeter
from kvrelay.kv_transfer.transport import Transport
from kvrelay.kv_transfer.ucx_log import is_expected

log = logging.getLogger(__name__)

_MOST_LINKS = 1024


class Links:
    """Owned by the transfer thread; `states` may be called by any."""

    def __init__(self, counters: Counters, *, expected_routes: tuple[str, ...], clock: Clock = monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._expected_routes = expected_routes
        self._meters: dict[str, LinkMeter] = {}

    def states(self) -> dict[str, LinkState]:
        """Return what is known of each link, by the name of the peer's agent."""
        now_s, meters = self._clock(), list(self._meters.items())
        return {peer: meter.state(now_s) for peer, meter in meters if meter.route or meter.bytes_per_s}

    def to(self, peer: str) -> LinkMeter:
        if peer not in self._meters:
            if len(self._meters) >= _MOST_LINKS:
                del self._meters[min(self._meters, key=lambda one: self._meters[one].used_s)]
            self._meters[peer] = LinkMeter(used_s=self._clock())
        return self._meters[peer]

    def disconnected(self, peer: str) -> None:
        """The connection is gone, and its route with it: the next one may choose another."""
        if (meter := self._meters.get(peer)) is not None:
            meter.route, meter.is_expected, meter.was_told = "", True, False

    def note_route(self, transport: Transport, peer: str, link: LinkMeter) -> None:
        """Say once over what we write to a peer, and how fast; loudly when it is not what it should be."""
        if not link.route and (route := transport.route(peer)):
            link.route, link.is_expected = route, is_expected(route, self._expected_routes)
            if not link.is_expected:
                wanted = ", ".join(self._expected_routes) or "anything but TCP"
                log.warning("writes to %s go over %s; expected is %s", peer, route, wanted)
                self._counters.add("routes_unexpected_total")
        if link.route and link.bytes_per_s and not link.was_told:
            link.was_told = True
            log.info("writes to %s go over %s at %.3g GB/s", peer, link.route, link.bytes_per_s / 1e9)
