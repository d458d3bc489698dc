"""What this node tells routers of its speed: the cost of prompt tokens and the links to decode nodes, as measured."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.layout import PageLayout
from kvrelay.core.time_fit import Fitted
from kvrelay.core.types import LinkState
from kvrelay.kv_transfer.link_records import add_links
from kvrelay.proto.v1 import fleet_pb2


def add_measured(
    record: fleet_pb2.NodeRecord,
    fitted: Fitted | None,
    links: Mapping[str, LinkState],
    *,
    chunk_tokens: int,
    layout: PageLayout,
    clock: Clock = monotonic,
) -> None:
    """Put into a record what this node has learned of its own speed; `clock` is that of the fit."""
    if fitted is not None:
        cost = cost_of(fitted, ring_size=record.ring_size, chunk_tokens=chunk_tokens, now_s=clock())
        record.cost.CopyFrom(cost)
    add_links(record, links, token_bytes=layout.row_bytes_all_layers)


def cost_of(fitted: Fitted, *, ring_size: int, chunk_tokens: int, now_s: float) -> fleet_pb2.NodeCost:
    """Return the cost of prompt tokens; what each chunk takes besides is spread over its tokens."""
    return fleet_pb2.NodeCost(
        start_s=fitted.start_s,
        token_s=fitted.first_in_pieces_s(chunk_tokens) * ring_size,
        pair_s=fitted.second_s * ring_size,
        observations=fitted.observations,
        age_s=now_s - fitted.at_s,
    )
