"""Tickets that come after their requests: which request one is for, and where it goes. On the event loop's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from kvrelay.core.errors import ServeError
from kvrelay.prefill_node.jobs import Job
from kvrelay.proto.v1 import handoff_pb2

_MOST_EARLY = 1024  # tickets that overtook their requests; one comes within moments of the other

Check = Callable[[handoff_pb2.Ticket, Job], None]


class LateTickets:
    """Of one node. `give` and `fail` reach the step thread."""

    def __init__(
        self,
        *,
        check: Check,
        give: Callable[[str, handoff_pb2.Ticket], None],
        fail: Callable[[str, ServeError], None],
    ) -> None:
        """
        Args:
            check: raises ServeError when a ticket is not for a job.
            give, fail: told the key of a submitted job, and its ticket or why it has none.
        """
        self._check, self._give, self._fail = check, give, fail
        self._awaiting: dict[str, Job] = {}
        self._early: OrderedDict[str, handoff_pb2.Ticket] = OrderedDict()

    def ticketed(self, job: Job) -> Job:
        """Return a job that is about to be submitted, with its ticket if that is here; else it is awaited from now on.

        Raises:
            ServeError: its ticket is not for it.
        """
        if not job.ticket_follows:
            return job
        ticket = self._early.pop(job.key, None)
        if ticket is None:
            self._awaiting[job.key] = job
            return job
        self._check(ticket, job)
        return replace(job, ticket=ticket, ticket_follows=False)

    def bring(self, key: str, ticket: handoff_pb2.Ticket) -> None:
        """Take a ticket whose request is here, or will be.

        Raises:
            ServeError: it is not for that request, which has failed by this.
        """
        job = self._awaiting.pop(key, None)
        if job is None:
            self._early[key] = ticket
            if len(self._early) > _MOST_EARLY:
                self._early.popitem(last=False)
            return
        try:
            self._check(ticket, job)
        except ServeError as err:
            self._fail(key, err)
            raise
        self._give(key, ticket)

    def forget(self, key: str) -> None:
        """The request is over."""
        self._awaiting.pop(key, None)
        self._early.pop(key, None)
