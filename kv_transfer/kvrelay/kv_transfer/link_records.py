"""What a node tells routers of its links: of the latest ones each, of the others what is usual."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from kvrelay.core.types import LinkState
from kvrelay.kv_transfer.transport import node_name
from kvrelay.proto.v1 import fleet_pb2

MOST_LINKS = 32  # in a record; every router reads every record every second or so


def links_by_peer(states: Mapping[str, LinkState]) -> dict[str, LinkState]:
    """Return the links by the peer's name: of its lives only the latest one counts."""
    newest: dict[str, LinkState] = {}
    for agent, state in states.items():
        peer = node_name(agent)
        if peer not in newest or state.age_s < newest[peer].age_s:
            newest[peer] = state
    return newest


def add_links(record: fleet_pb2.NodeRecord, states: Mapping[str, LinkState], *, token_bytes: int) -> None:
    """Put into a record the links to the nodes that were written to last, and what one of the others takes.

    Links that go over what they should not come first, so that nobody misses them.

    Args:
        states: of rank 0, by the name of the peer's agent; the ranks write side by side.
        token_bytes: that one relayed token has in all layers.
    """
    newest = links_by_peer(states)
    in_order = sorted(newest, key=lambda peer: (newest[peer].is_expected, newest[peer].age_s))
    links = [_link(peer, newest[peer], record.ring_size, token_bytes) for peer in in_order]
    record.links.extend(links[:MOST_LINKS])
    others = [link.token_s for link in links[MOST_LINKS:] if link.token_s]
    record.other_link_token_s = statistics.median(others) if others else 0.0


def _link(peer: str, state: LinkState, ring_size: int, token_bytes: int) -> fleet_pb2.Link:
    together = state.bytes_per_s * ring_size
    link = fleet_pb2.Link(peer=peer, route=state.route, is_unexpected=not state.is_expected, age_s=state.age_s)
    if together:
        link.bytes_per_s, link.token_s = together, token_bytes / together
    return link
