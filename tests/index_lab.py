"""Nodes that publish their blocks to an index server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvrelay.core.types import Incarnation, Role, Tier
from kvrelay.index.server import EmbeddedServer
from kvrelay.index.writer import PrefixWriter

FLEET = "test"
A, B = Incarnation("a", 1), Incarnation("b", 2**63 - 1)


@asynccontextmanager
async def a_writer(
    server: EmbeddedServer,
    node: Incarnation = A,
    role: Role = Role.PREFILL,
    *,
    tier: Tier = Tier.DEVICE,
    holding: Sequence[bytes] = (),
) -> AsyncIterator[PrefixWriter]:
    """A writer of a node that holds `holding` all the time."""
    writer = PrefixWriter(server.url, FLEET, node=node, role=role, tier=tier, all_hashes=lambda: holding)
    await writer.start()
    writer.publish(holding)
    try:
        yield writer
    finally:
        await writer.stop()
