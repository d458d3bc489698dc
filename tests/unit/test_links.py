"""What is said of a link to a peer: its route for as long as the connection lasts and the peer is written to."""

from __future__ import annotations

from typing import cast

from kvrelay.core.clock import ManualClock
from kvrelay.core.types import Counters, LinkState
from kvrelay.kv_transfer.link_meter import ROUTE_KNOWN_S
from kvrelay.kv_transfer.link_records import links_by_peer
from kvrelay.kv_transfer.links import Links
from kvrelay.kv_transfer.transport import Transport

GIB = 1 << 30
PEER = "decode-0@0000000000000001/0"


class Routes:
    """What a link needs of a transport."""

    def __init__(self, route: str) -> None:
        self.now = route

    def route(self, peer: str) -> str:
        return self.now


class Written:
    """Links of which one was written to, over what `routes` says."""

    def __init__(self, route: str) -> None:
        self.clock, self.counters, self.routes = ManualClock(), Counters(), Routes(route)
        self.links = Links(self.counters, expected_routes=("rc",), clock=self.clock)

    def write(self) -> None:
        meter = self.links.to(PEER)
        meter.posted(self.clock())
        self.clock.advance(1.0)
        meter.ended(GIB, self.clock())
        self.links.note_route(cast(Transport, self.routes), PEER, meter)

    @property
    def state(self) -> LinkState:
        return self.links.states()[PEER]


def test_with_the_connection_goes_its_route_and_not_its_speed() -> None:
    written = Written("tcp/eth0")
    written.write()
    assert (written.state.route, written.state.is_expected) == ("tcp/eth0", False)

    written.links.disconnected(PEER)

    assert (written.state.route, written.state.is_expected) == ("", True)
    assert written.state.bytes_per_s == GIB


def test_the_next_connection_is_looked_at_anew() -> None:
    written = Written("rc_mlx5/mlx5_0:1")
    written.write()
    written.links.disconnected(PEER)
    written.routes.now = "tcp/eth0"
    written.write()

    assert (written.state.route, written.state.is_expected) == ("tcp/eth0", False)
    assert written.counters.values["routes_unexpected_total"] == 1


def test_of_a_peer_that_may_have_gone_long_ago_no_route_is_shown_until_it_is_written_to_again() -> None:
    written = Written("tcp/eth0")
    written.write()
    written.clock.advance(ROUTE_KNOWN_S)
    before = written.state
    written.write()

    assert (before.route, before.is_expected) == ("", True)
    assert written.state.route == "tcp/eth0"


def test_of_the_lives_of_a_peer_the_one_used_last_counts() -> None:
    states = {
        "d@0000000000000002/0": LinkState(2.0, "rc/a", is_expected=True, age_s=1.0),
        "d@0000000000000001/0": LinkState(1.0, "tcp/b", is_expected=False, age_s=50.0),
        "e@0000000000000003/0": LinkState(3.0, "rc/a", is_expected=True, age_s=9.0),
    }

    assert links_by_peer(states) == {"d": states["d@0000000000000002/0"], "e": states["e@0000000000000003/0"]}
