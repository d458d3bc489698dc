"""The ranks of a ring as threads of one process: what one sends lies in queues until the other takes it.

Shapes in this file: B rows of a block, Y elements of a stored row.
"""

from __future__ import annotations

from queue import Queue

from torch import Tensor

from kvrelay.prefill_node.group import Header

_LONGEST_S = 30.0


class Wires:
    """Queues by the rank that takes from them; replies by the rank that gave them."""

    def __init__(self, size: int) -> None:
        self.blocks: list[Queue[Tensor]] = [Queue() for _ in range(size)]
        self.headers: list[Queue[Tensor]] = [Queue() for _ in range(size)]
        self.steps: list[Queue[bytes]] = [Queue() for _ in range(size)]
        self.replies: list[Queue[bytes]] = [Queue() for _ in range(size)]


class Hop:
    """Has the method of `Exchange`."""

    def __init__(self, wires: Wires, rank: int, incoming_BY: Tensor, *, has_header: bool) -> None:
        self._wires, self._rank, self._incoming_BY, self._has_header = wires, rank, incoming_BY, has_header

    def wait(self) -> Header | None:
        if self._incoming_BY.shape[0]:
            self._incoming_BY.copy_(self._wires.blocks[self._rank].get(timeout=_LONGEST_S))
        return Header.unpack(self._wires.headers[self._rank].get(timeout=_LONGEST_S)) if self._has_header else None


class ThreadGroup:
    """Has the methods of `RingGroup` that the step threads use."""

    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank, self.size, self._wires = rank, len(wires.steps), wires

    def post(self, block_BY: Tensor, incoming_BY: Tensor, header: Header | None) -> Hop:
        following = (self.rank + 1) % self.size
        if block_BY.shape[0]:
            self._wires.blocks[following].put(block_BY.clone())
        if header is not None:
            self._wires.headers[following].put(header.pack())
        return Hop(self._wires, self.rank, incoming_BY, has_header=header is not None)

    def broadcast(self, message: bytes) -> None:
        for rank in range(1, self.size):
            self._wires.steps[rank].put(message)

    def receive(self) -> bytes:
        return self._wires.steps[self.rank].get(timeout=_LONGEST_S)

    def send_to_leader(self, message: bytes) -> None:
        self._wires.replies[self.rank].put(message)

    def gather(self) -> list[bytes]:
        return [self._wires.replies[rank].get(timeout=_LONGEST_S) for rank in range(1, self.size)]
