"""The other routers of the fleet: what they have placed counts here as if this router had placed it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import UnavailableError
from kvrelay.core.supervise import keep
from kvrelay.core.types import Incarnation
from kvrelay.index.router_loads import LEASE_S, RouterLoads
from kvrelay.proto import convert
from kvrelay.proto.v1.fleet_pb2 import NodeLoad
from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.others import OthersLoads
from kvrelay.router.score import NO_LOAD, Load

BUSY_S = 0.1  # between two exchanges while anything is placed anywhere
IDLE_S = 1.0
TELL_ALL_S = 600.0  # what has been told of nodes that are gone is kept until all is told anew

log = logging.getLogger(__name__)


class Replicas:
    """Exchanges loads once started. To be used from one event loop."""

    def __init__(self, loads: RouterLoads, *, own: Callable[[], LoadColumns], clock: Clock = monotonic) -> None:
        """`own` returns what this router has placed; nobody else may take its changes."""
        self._loads = loads
        self._own = own
        self._clock = clock
        self._others = OthersLoads()
        self._nobody = LoadColumns()
        self._heard_s = float("-inf")
        self._told_all_s = float("-inf")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_routers(self) -> int:
        return self._others.num_routers + 1

    async def start(self) -> None:
        self._task = keep(self._run(), name="replicas")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with suppress(UnavailableError):  # else its lease will
            await self._loads.withdraw()
        await self._loads.close()

    def hurry(self) -> None:
        """Tell the others soon: something was placed."""
        self._wake.set()

    def others(self) -> LoadColumns:
        """Return what the other routers have placed; nothing when they have not been heard of lately."""
        now_s = self._clock()
        if now_s - self._heard_s >= LEASE_S:
            return self._nobody
        self._others.columns.at(now_s)
        return self._others.columns

    async def exchange(self) -> None:
        """Tell and ask once; what has not changed is told every TELL_ALL_S only.

        Raises:
            UnavailableError: the server did not answer.
        """
        own = self._own()
        found = None
        if self._clock() - self._told_all_s < TELL_ALL_S:
            changed = own.take_changed()
            found = await self._loads.exchange([_record(node, own) for node in changed], is_whole=False)
        if found is None:
            self._told_all_s = self._clock()
            own.take_changed()
            found = await self._loads.exchange([_record(node, own) for node in own], is_whole=True)
        if found is not None:
            self._heard_s = self._clock()
            self._others.hear(found, self._heard_s)

    async def _run(self) -> None:
        reachable = True
        while True:
            try:
                await self.exchange()
                reachable = True
            except UnavailableError as err:
                if reachable:
                    log.warning("this router does not see what others place: %s", err)
                reachable = False
            is_busy = self._own().has_requests or self._others.columns.has_requests
            if is_busy and reachable:
                await asyncio.sleep(BUSY_S)
                continue
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._wake.wait()


def _record(node: Incarnation, loads: Mapping[Incarnation, Load]) -> NodeLoad:
    load = loads.get(node, NO_LOAD)
    return NodeLoad(
        node=convert.incarnation_to_pb(node),
        requests=load.requests,
        tokens=load.tokens,
        pages=load.pages,
        works_s=load.works_s,
        recent_s=load.recent_s,
        context=load.context,
        fetch_tokens=load.fetches,
    )


def together(some: Mapping[Incarnation, Load], more: Mapping[Incarnation, Load]) -> Mapping[Incarnation, Load]:
    """Return the sum of loads by node; it shows the loads as they are when it is asked."""
    return _Together(some, more) if more else some


class _Together(Mapping[Incarnation, Load]):
    def __init__(self, some: Mapping[Incarnation, Load], more: Mapping[Incarnation, Load]) -> None:
        self._some, self._more = some, more

    def __getitem__(self, node: Incarnation) -> Load:
        one, other = self._some.get(node), self._more.get(node)
        if one is None and other is None:
            raise KeyError(node)
        return _sum(one or NO_LOAD, other or NO_LOAD)

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self._some.keys() | self._more.keys())

    def __len__(self) -> int:
        return len(self._some.keys() | self._more.keys())


def _sum(one: Load, other: Load) -> Load:
    return Load(
        one.requests + other.requests,
        one.tokens + other.tokens,
        one.pages + other.pages,
        tuple(sorted(one.works_s + other.works_s)),
        one.recent_s + other.recent_s,
        one.context + other.context,
        one.fetches + other.fetches,
        one.turn + other.turn,  # only one's own are numbered
    )
