"""Notices that a node from which latents were pulled has been replaced: then its old life writes no more."""

from __future__ import annotations

import asyncio
import logging

from kvrelay.core.errors import UnavailableError
from kvrelay.index.registry import NodeRegistry
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.proto.convert import incarnation_from_pb

log = logging.getLogger(__name__)


async def watch_writers(hub: ReaderHub, *, index_url: str, fleet: str, period_s: float) -> None:
    """Look into the registry every `period_s` seconds while a session is open, until cancelled."""
    registry = NodeRegistry(index_url, fleet)
    try:
        while True:
            await asyncio.sleep(period_s)
            # Only writers known before the question: one that registered after the answer would look replaced.
            writers = hub.open_writers()
            if not writers:
                continue
            try:
                records = await registry.nodes()
            except UnavailableError as err:
                log.info("the registry does not say who was replaced: %s", err)
                continue
            lives = {one.node.name: incarnation_from_pb(one.node) for one in records}
            for writer in writers:
                life = lives.get(writer.name)
                if life is not None and life != writer:
                    hub.writer_dead(writer, f"{life} has registered")
    finally:
        await registry.close()
