"""Cached blocks on their way to other nodes: what the ranks are told of them, and what they hold. Pure.

A push is a hand-off of which every row is cached: each rank writes the pages that it owns. From `begin` until every
rank has said that none of its writes can still read them, its pages are held. Owned by the step thread of rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.errors import CapacityError
from kvrelay.core.shard import Span
from kvrelay.prefill_node.closing import Closing
from kvrelay.prefill_node.jobs import Phase
from kvrelay.prefill_node.owned_runs import owned_runs
from kvrelay.prefill_node.pages import RingPages
from kvrelay.prefill_node.rank_pages import RankPage
from kvrelay.proto.v1 import handoff_pb2, ring_pb2


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks that another node asks for, and where they go."""

    key: str  # its name inside the ring, unlike that of any request
    ticket: handoff_pb2.Ticket
    hashes: tuple[bytes, ...]
    picked: tuple[int, ...] | None = None  # pages of these blocks that are asked for, by number; None = all


@dataclass(slots=True)
class _Record:
    push: Push
    held: tuple[RankPage, ...]
    pages: tuple[RankPage, ...]  # of these, the ones that are asked for
    sent: bool = False  # the ranks know of it
    closing: Closing | None = None  # None: not yet


class Pushes:
    def __init__(self, pages: RingPages, *, most: int) -> None:
        """`most`: at a time; more are refused."""
        self._pages = pages
        self._most = most
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        """Return how many hold pages."""
        return len(self._records)

    @property
    def num_closing(self) -> int:
        return sum(record.closing is not None for record in self._records.values())

    @property
    def wants_step(self) -> bool:
        """The ranks are to be told something."""
        return any(not one.sent or (one.closing is not None and not one.closing.told) for one in self._records.values())

    def begin(self, push: Push) -> None:
        """Hold the pages of cached blocks, to be written with the next step.

        Raises:
            CapacityError: too many are on their way.
            StaleMessageError: some block is not here any more.
        """
        assert push.key not in self._records, f"{push.key} has begun already"
        if len(self._records) >= self._most:
            raise CapacityError(f"{len(self._records)} pushes are on their way from here, the limit is {self._most}")
        held = self._pages.pin(push.hashes)
        pages = held if push.picked is None else tuple(held[number] for number in push.picked)
        self._records[push.key] = _Record(push, held, pages)

    def phase_of(self, key: str) -> Phase | None:
        record = self._records.get(key)
        return None if record is None else Phase.SEALING if record.closing is None else Phase.CLOSING

    def close(self, key: str, *, abort: bool) -> bool:
        """End a push; its pages come back when every rank has drained. False: there is none, or it has ended.

        Args:
            abort: every rank gives up; False when the asking node has taken the blocks.
        """
        record = self._records.get(key)
        if record is None or record.closing is not None:
            return False
        record.closing = Closing(ring_size=self._pages.ring_size, abort=abort)
        return True

    def plan(self, step: ring_pb2.RingStep) -> None:
        """Put into a step what the ranks do not know yet."""
        for key, record in self._records.items():
            if not record.sent:
                record.sent = True
                runs = owned_runs(record.pages, Span(0, len(record.pages)))
                step.pushes.append(ring_pb2.RingPush(key=key, pages=runs, ticket=record.push.ticket))
            if record.closing is not None:
                record.closing.plan(step, key)

    def drained(self, keys: Sequence[str], rank: int) -> list[str]:
        """Take in that a rank holds no write in flight any more; return the pushes that are over."""
        over = []
        for key in keys:
            record = self._records.get(key)
            if record is not None and record.closing is not None and record.closing.drained(rank):
                self._pages.held.release(record.held)
                del self._records[key]
                over.append(key)
        return over
