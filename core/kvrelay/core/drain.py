"""What a node was asked to end for: to leave, or to go on in its other role."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.lifecycle import Ending, StopSignals


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
