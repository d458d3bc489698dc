"""The lease thread of rank 0: checks leases and keeps the node's record alive, whatever the other threads do."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from kvrelay.core.errors import StaleMessageError, UnavailableError
from kvrelay.core.health import Beats
from kvrelay.core.types import Incarnation
from kvrelay.index.registry import NodeRegistry
from kvrelay.prefill_node.leases import Leases
from kvrelay.proto.v1 import fleet_pb2

_CHECKS_PER_LEASE = 10
# Heartbeats come so many times as often while the last one told of prompts to compute: until a router hears otherwise,
# it believes that this work still waits here, and has the next turn of a chat computed anew elsewhere.
_BUSY_RATE = 5
log = logging.getLogger(__name__)


class LeaseThread:
    """Start it when the node is ready to serve; `stop` withdraws the record."""

    def __init__(
        self,
        leases: Leases,
        node: Incarnation,
        *,
        index_url: str,
        fleet: str,
        heartbeat_s: float,
        record: Callable[[], fleet_pb2.NodeRecord | None],
        on_replaced: Callable[[], object],
    ) -> None:
        """
        Args:
            node: this process.
            record: returns what to register now, or None while the node should not be found, as when it makes no
                progress: its record is then left to run out. Called on this thread.
            on_replaced: a newer process has the node's name; this one must leave. Called on this thread.
        """
        self._leases = leases
        self._node = node
        self._index_url = index_url
        self._fleet = fleet
        self._heartbeat_s = heartbeat_s
        self._record = record
        self._on_replaced = on_replaced
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = False
        self._registered = threading.Event()
        self._period_s = leases.lease_s / _CHECKS_PER_LEASE
        self._beats = Beats(period_s=self._period_s)
        self._thread = threading.Thread(target=self._main, name="lease", daemon=True)

    def start(self, *, wait_s: float) -> None:
        """Start, and wait until the first try to register has ended one way or the other."""
        self._thread.start()
        self._registered.wait(wait_s)

    def stuck_s(self) -> float:
        """Return for how long no lease was checked that should have been. Any thread."""
        return self._beats.stuck_s()

    def beat_now(self) -> None:
        """Tell the registry at once, for instance that the node is draining."""
        if self._loop is not None and self._wake is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def stop(self) -> None:
        """Withdraw the record and end the thread."""
        self._stopping = True
        self.beat_now()
        self._thread.join()

    def _main(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        registry = NodeRegistry(self._index_url, self._fleet)
        try:
            async with asyncio.TaskGroup() as tasks:  # a bug in one ends both, the thread and so the process
                checks = tasks.create_task(self._check_leases())
                await self._beat_forever(registry)
                checks.cancel()
        finally:
            await self._withdraw(registry)
            await registry.close()

    async def _check_leases(self) -> None:
        while True:
            self._beats.beat()
            await asyncio.sleep(self._period_s)
            self._leases.check()

    async def _beat_forever(self, registry: NodeRegistry) -> None:
        assert self._wake is not None, "set by _run"
        ttl_s, known = 3 * self._heartbeat_s, False
        while not self._stopping:
            pause_s = self._heartbeat_s
            try:
                record = self._record()
                if record is not None and record.queued_tokens:
                    pause_s /= _BUSY_RATE
                if record is not None and known:
                    await registry.heartbeat(record, ttl_s)
                elif record is not None:
                    await registry.register(record, ttl_s)
                    known = True
            except UnavailableError as err:
                log.warning("the registry did not hear this heartbeat: %s", err)
            except StaleMessageError as err:
                log.error("%s; this process drains and leaves", err)
                self._on_replaced()
                await self._until_stopped()  # the drain may take long; leases are checked until its end
                return
            finally:
                self._registered.set()
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    async def _until_stopped(self) -> None:
        assert self._wake is not None, "set by _run"
        while not self._stopping:
            self._wake.clear()
            await self._wake.wait()

    async def _withdraw(self, registry: NodeRegistry) -> None:
        try:
            await registry.withdraw(self._node)
        except UnavailableError as err:
            log.info("not withdrawn from the registry, its lease will: %s", err)
