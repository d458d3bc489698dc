"""The faults of parts in the lab: what they may do to a write, and what no transport may do."""

from __future__ import annotations

from typing import Any

from faults.lab.part_faults import LabTransport
from faults.lab.switchboard import Switchboard
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import PENDING, Done

A_MINUTE = 60.0


class Recorder:
    """A transport that only writes down what is posted, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def post(self, peer: str, copies: list[Copy], notice: bytes) -> tuple[Any, ...]:
        self.log.append(("part", peer, notice, tuple(copies)))
        return self.log[-1]

    def write_fence(self, peer: str, cell: int, value: int) -> tuple[Any, ...]:
        self.log.append(("fence", peer, cell))
        return self.log[-1]

    def poll(self, handle: tuple[Any, ...]) -> Done:
        return Done(0)

    def release(self, handle: tuple[Any, ...]) -> None:
        self.log.append(("released", handle[1]))


def test_a_delayed_part_leaves_before_the_fence_of_its_peer_and_of_no_other() -> None:
    real, board = Recorder(), Switchboard()
    lab = LabTransport(real, board)  # type: ignore[arg-type]
    board.arm("part", kind="delay", seconds=A_MINUTE)
    first = lab.post("a", [Copy(0, 0, 8)], b"first")
    other = lab.post("b", [Copy(0, 0, 8)], b"other")
    assert lab.poll(first) == lab.poll(other) == PENDING
    assert not real.log

    lab.write_fence("a", 3, 1)

    assert [entry[:3] for entry in real.log] == [("part", "a", b"first"), ("fence", "a", 3)]
    assert lab.poll(first) == Done(0)
    assert lab.poll(other) == PENDING


def test_a_part_that_never_left_does_not_leave_when_it_is_let_go() -> None:
    real, board = Recorder(), Switchboard()
    lab = LabTransport(real, board)  # type: ignore[arg-type]
    board.arm("part", kind="delay", seconds=A_MINUTE)

    lab.release(lab.post("a", [Copy(0, 0, 8)], b"first"))
    lab.write_fence("a", 3, 1)

    assert real.log == [("fence", "a", 3)]


def test_a_notice_that_comes_without_its_data_touches_no_page_but_its_own() -> None:
    real, board = Recorder(), Switchboard()
    lab = LabTransport(real, board)  # type: ignore[arg-type]
    board.arm("part", kind="overtake")

    lab.post("a", [Copy(64, 4096, 640)], b"first")

    assert real.log == [("part", "a", b"first", (Copy(64, 4096, 1),))]
