"""How a node is known to the fleet: its record in the registry, and what the registry says of the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from kvrelay.core.errors import StaleMessageError, UnavailableError
from kvrelay.core.types import Incarnation
from kvrelay.index.registry import NodeRegistry
from kvrelay.proto.convert import incarnation_from_pb
from kvrelay.proto.v1 import fleet_pb2

log = logging.getLogger(__name__)


class Presence:
    """Keeps the record alive, and watches for writers that were replaced. A task of the asyncio thread."""

    def __init__(
        self,
        registry: NodeRegistry,
        *,
        record: Callable[[], fleet_pb2.NodeRecord | None],
        writers: Callable[[], frozenset[Incarnation]],
        on_writer_replaced: Callable[[Incarnation, str], None],
        on_replaced: Callable[[], None],
        heartbeat_s: float,
    ) -> None:
        """Prepare the task.

        Args:
            record: the node's record now; None while it should not be found, as when it makes no progress.
            writers: nodes whose writes may still reach our pages.
            on_writer_replaced: a newer life of a writer is registered, so the old one is known to be gone.
            on_replaced: a newer life of this node is registered.
        """
        self._registry = registry
        self._record = record
        self._writers = writers
        self._on_writer_replaced = on_writer_replaced
        self._on_replaced = on_replaced
        self._heartbeat_s = heartbeat_s
        self._due = asyncio.Event()
        self._reachable = True
        self._registered = False  # before that, another life under our name is an older one, not a newer one

    def hurry(self) -> None:
        """Tell the registry now what has changed."""
        self._due.set()

    async def enter(self) -> None:
        """Register for the first time; a registry that is away is tried again by `run`."""
        await self._try(self._tell)

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self._due.clear()  # first: what changes while the registry is told must be told again
            await self._try(self._beat)
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._due.wait()

    async def leave(self, node: Incarnation) -> None:
        """Take the record out and let go of the registry."""
        await self._try(lambda: self._registry.withdraw(node))
        await self._registry.close()

    @property
    def _ttl_s(self) -> float:
        return 3 * self._heartbeat_s

    async def _tell(self) -> None:
        record = self._record()
        if record is None:
            return
        if self._registered:
            await self._registry.heartbeat(record, self._ttl_s)
        else:
            await self._registry.register(record, self._ttl_s)
            self._registered = True

    async def _beat(self) -> None:
        await self._tell()
        # Only writers known before the question: one that registered after the answer would look replaced.
        writers = self._writers()
        if not writers:
            return
        lives = {one.node.name: incarnation_from_pb(one.node) for one in await self._registry.nodes()}
        for writer in writers:
            life = lives.get(writer.name)
            if life is not None and life != writer:
                self._on_writer_replaced(writer, f"{life} has registered")

    async def _try(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await act()
        except StaleMessageError as err:
            log.error("this life of the node is over: %s", err)
            self._on_replaced()
        except UnavailableError as err:
            if self._reachable:
                log.warning("registry: %s", err)
            self._reachable = False
        else:
            self._reachable = True
