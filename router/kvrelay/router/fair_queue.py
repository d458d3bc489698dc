"""Whose request is next: every tenant has a lane and a counter of the tokens it was served, the least goes. Pure.

A tenant that comes back after a pause is lifted to where the others are, so nobody saves up a right to a burst.
Source: virtual token counter, Sheng et al. 2024 (arXiv:2401.00588).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that waits for its turn."""

    tenant: str
    tokens: float  # that serving it takes
    weight: float  # of its tenant: twice the weight, twice the share


@dataclass(slots=True)
class _Lane:
    served: float  # tokens over weight
    tickets: deque[Ticket] = field(default_factory=deque)


class FairQueue:
    """Lanes of the tenants that wait; one that has nothing waiting is remembered only while it is ahead of the rest."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._level = 0.0  # counter of the tenant that was served last, before it was

    def __len__(self) -> int:
        return sum(len(lane.tickets) for lane in self._lanes.values())

    def add(self, ticket: Ticket) -> None:
        """Wait behind what the same tenant has waiting."""
        lane = self._lanes.setdefault(ticket.tenant, _Lane(self._level))
        if not lane.tickets:
            lane.served = max(lane.served, self._level)
        lane.tickets.append(ticket)

    def next(self) -> Ticket | None:
        """Take the request whose turn it is; None when none waits."""
        waiting = [(lane.served, tenant) for tenant, lane in self._lanes.items() if lane.tickets]
        if not waiting:
            return None
        self._level, tenant = min(waiting)
        lane = self._lanes[tenant]
        ticket = lane.tickets.popleft()
        lane.served += ticket.tokens / ticket.weight
        for idle in [name for name, one in self._lanes.items() if not one.tickets and one.served <= self._level]:
            del self._lanes[idle]
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take a request out that was not served."""
        self._lanes[ticket.tenant].tickets.remove(ticket)

    def give_back(self, ticket: Ticket) -> None:
        """Do not count a request that was taken and not served after all."""
        if (lane := self._lanes.get(ticket.tenant)) is not None:
            lane.served -= ticket.tokens / ticket.weight

    def tokens_ahead(self, tenant: str) -> float:
        """Return the tokens that would be served before a new request of this tenant."""
        own = self._lanes.get(tenant, _Lane(self._level))
        own_tokens = sum(one.tokens for one in own.tickets)
        until = max(own.served, self._level) + sum(one.tokens / one.weight for one in own.tickets)
        ahead = own_tokens
        for name, lane in self._lanes.items():
            served = lane.served
            for one in lane.tickets if name != tenant else ():
                if served > until:
                    break
                served += one.tokens / one.weight
                ahead += one.tokens
        return ahead
