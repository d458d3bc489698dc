"""What a decode node says of itself."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.types import counted_together
from kvrelay.decode_node.node import DecodeNode
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.v1 import common_pb2


def node_stats(
    node: DecodeNode, *, sessions: Mapping[str, int], counters: tuple[Mapping[str, float], ...]
) -> common_pb2.NodeStats:
    """Return the account of a node.

    Args:
        sessions: hand-off sessions by state.
        counters: of the parts.
    """
    account = node.book.account()
    active, running = node.records.num_active, node.records.num_running
    return common_pb2.NodeStats(
        node=incarnation_to_pb(node.incarnation),
        total_pages=account.total,
        free_pages=account.free,
        cached_pages=account.cached,
        pinned_pages=account.pinned,
        quarantined_pages=account.quarantined,
        sessions=dict(sessions),
        active_requests=active,
        queued_requests=active - running,
        draining=node.leaving,
        counters=counted_together((node.counters.values, *counters)),
    )
