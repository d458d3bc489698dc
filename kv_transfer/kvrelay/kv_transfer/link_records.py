"""What a node tells routers of its links."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.types import LinkState
from kvrelay.kv_transfer.transport import node_name
from kvrelay.proto.v1 import fleet_pb2


def links_of(states: Mapping[str, LinkState], *, ring_size: int, token_bytes: int) -> list[fleet_pb2.Link]:
    """Return the links to each node that was written to.

    Args:
        states: of rank 0, by the name of the peer's agent; the ranks write side by side.
        token_bytes: that one relayed token has in all layers.
    """
    links = []
    for agent, state in states.items():
        together = state.bytes_per_s * ring_size
        link = fleet_pb2.Link(peer=node_name(agent), route=state.route, is_unexpected=not state.is_expected)
        if together:
            link.bytes_per_s, link.token_s = together, token_bytes / together
        links.append(link)
    return links
