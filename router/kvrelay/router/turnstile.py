"""Lets requests through to the nodes in fair order, no more at a time than keep the nodes busy.

What waits here can still be overtaken by a tenant that has had less; what is on a node cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.router.fair_queue import FairQueue, Ticket
from kvrelay.router.tenants import Tenant


class Pass:
    """The right to be on a node; ends when the prompt is computed or the request is over."""

    def __init__(self, turnstile: Turnstile, *, waited: bool) -> None:
        self._turnstile: Turnstile | None = turnstile
        self.waited = waited

    def end(self) -> None:
        """Make room for another; the second time nothing happens."""
        if self._turnstile is not None:
            turnstile, self._turnstile = self._turnstile, None
            turnstile.ended()


class Turnstile:
    """To be used from one event loop."""

    def __init__(self, most: Callable[[], int]) -> None:
        """`most` returns how many requests may be on the nodes at a time, now."""
        self._most = most
        self._queue = FairQueue()
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._passed = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def tokens_ahead(self, tenant: Tenant) -> float:
        return self._queue.tokens_ahead(tenant.name)

    async def turn(self, tenant: Tenant, tokens: float) -> Pass:
        """Wait for the turn of a request; a caller that is cancelled leaves the queue at once."""
        ticket = Ticket(tenant.name, max(1.0, tokens), tenant.quota.weight)
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._queue.add(ticket)
        self._let_through()
        waited = not turn.done()
        try:
            await turn
        except asyncio.CancelledError:
            if ticket in self._turns:
                del self._turns[ticket]
                self._queue.leave(ticket)
            elif not turn.cancelled():  # let through and cancelled in one turn of the loop
                self.ended()
            raise
        return Pass(self, waited=waited)

    def ended(self) -> None:
        """For `Pass.end`."""
        self._passed -= 1
        self._let_through()

    def _let_through(self) -> None:
        while self._passed < max(1, self._most()) and (ticket := self._queue.next()) is not None:
            turn = self._turns.pop(ticket)
            if turn.cancelled():  # in this turn of the loop; its caller does not know yet
                self._queue.give_back(ticket)
                continue
            self._passed += 1
            turn.set_result(None)
