"""What a node was asked to end for: to leave, or to go on in its other role."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.lifecycle import Ending, StopSignals

_REST_S = 2.0  # for the data plane to have let go of what has ended
_REST_CHECK_S = 0.05
log = logging.getLogger(__name__)


class OnDrain(Protocol):
    """Takes note that a node is to drain; see `DrainRequests.ask`."""

    def __call__(self, *, switch_role: bool) -> None: ...


class DrainRequests:
    """Of one process, in whatever role. To be used on the event loop."""

    def __init__(self, stop: StopSignals, *, why_no_switch: str = "this process has one role only") -> None:
        """
        Args:
            stop: asks to leave.
            why_no_switch: why this process has no other role; empty = it has one.
        """
        self._stop = stop
        self._why_no_switch = why_no_switch
        self._switch = asyncio.Event()

    def ask(self, *, switch_role: bool = False) -> None:
        """Ask for a drain, and then for the end or, with `switch_role`, for the other role.

        Raises:
            InvalidRequestError: this process has no other role, or was asked to leave.
        """
        if not switch_role:
            self._stop.ask()
            return
        if self._why_no_switch:
            raise InvalidRequestError(self._why_no_switch)
        if self._stop.asked:
            raise InvalidRequestError("this node was asked to leave before; it does not change its role any more")
        self._switch.set()

    def role_decided(self) -> None:
        """The role was changed, or cannot be changed now; whoever still wants to must ask again."""
        self._switch.clear()

    @property
    def ending(self) -> Ending:
        """What is asked for by now: whoever is asked to leave does not switch."""
        return Ending.SWITCHES if self._switch.is_set() and not self._stop.asked else Ending.LEAVES

    async def wait(self) -> None:
        """Wait until a drain is asked for."""
        waits = [asyncio.ensure_future(one.wait()) for one in (self._stop, self._switch)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()


class Drainable(Protocol):
    """A node in one role."""

    @property
    def active_requests(self) -> int: ...
    @property
    def why_not_elsewhere(self) -> str:
        """Why the pool of the drained node cannot be used otherwise; empty = it can."""
        ...

    async def drained(self) -> None:
        """Tell the routers, take nothing new once they know, and wait until everything here has ended."""
        ...

    def serve_again(self) -> None:
        """Take new requests again after `drained`."""
        ...


async def drained_for(node: Drainable, asked: DrainRequests) -> Ending:
    """Wait until a drain is asked for and has come to its end; return what follows.

    A node whose pool may still be written to does not change its role: it serves again.
    """
    while True:
        await asked.wait()
        log.info("draining: %d requests are here", node.active_requests)
        await node.drained()
        if asked.ending is Ending.LEAVES or not (why_not := await _why_not_elsewhere(node)):
            return asked.ending
        log.error("this node keeps its role: %s", why_not)
        asked.role_decided()
        node.serve_again()


async def _why_not_elsewhere(node: Drainable) -> str:
    """Ask until it can, but not for long: the data plane lets go of a hand-off a moment after its request has ended."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _REST_S
    while (why_not := node.why_not_elsewhere) and loop.time() < until_s:  # noqa: ASYNC110 - many threads lead there
        await asyncio.sleep(_REST_CHECK_S)
    return why_not
