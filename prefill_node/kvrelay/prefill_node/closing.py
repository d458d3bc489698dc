"""How a hand-off ends on all ranks: they are told once, and each says when none of its writes is in flight. Pure."""

from __future__ import annotations

from kvrelay.proto.v1 import ring_pb2


class Closing:
    """Of one job or push; its pages are held until the last rank has drained. Owned by the step thread of rank 0."""

    def __init__(self, *, ring_size: int, abort: bool) -> None:
        """`abort`: every rank gives up; False when the reader has what it wanted."""
        self.told = False  # the ranks know of it
        self._abort = abort
        self._undrained = set(range(ring_size))

    def plan(self, step: ring_pb2.RingStep, key: str) -> None:
        """Put into a step what the ranks do not know yet."""
        if self.told:
            return
        self.told = True
        step.closes.append(key)
        if self._abort:
            step.aborts.append(key)

    def drained(self, rank: int) -> bool:
        """Take in that a rank has drained; True when it was the last."""
        self._undrained.discard(rank)
        return self.told and not self._undrained
