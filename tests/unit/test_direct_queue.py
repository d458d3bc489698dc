"""Parts on their way into mapped pools: what leaves together, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer import direct_queue
from kvrelay.kv_transfer.direct_queue import DirectQueue, DirectWrite, Link
from kvrelay.kv_transfer.notice_bundle import unbundle
from kvrelay.kv_transfer.plan import Copy, CopyTable
from kvrelay.kv_transfer.transport import PENDING, Address, Done, Failed, Handle, Progress, Region

ADDRESS = Address("played", "p", b"", 0, Region(0, 1 << 40), 1, Region(0, 8))


@dataclass
class Played:
    """A device whose kernels end when they are told to, and a transport whose writes do."""

    launched: list[tuple[str, list[int]]] = field(default_factory=list)  # peer, and the bytes of each part
    ended: int = 0  # kernels
    asked: int = 0  # times
    refuses: bool = False
    tails: list[tuple[str, list[Copy], list[bytes]]] = field(default_factory=list)
    progress: dict[int, Progress] = field(default_factory=dict)  # of a tail
    released: list[int] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def launch(self, peer: str, table: CopyTable) -> Callable[[], bool]:
        if self.refuses:
            raise TransferError("refused")
        self.launched.append((peer, table[:, 2].reshape(-1, 2).sum(axis=1).tolist()))
        number = len(self.launched)

        def landed() -> bool:
            self.asked += 1
            return self.ended >= number

        return landed

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        if peer in self.gone:
            raise TransferError(f"{peer} is gone")
        self.tails.append((peer, list(copies), unbundle(notice)))
        return len(self.tails) - 1

    def poll(self, handle: Handle) -> Progress:
        assert isinstance(handle, int)
        return self.progress.get(handle, PENDING)

    def release(self, handle: Handle) -> None:
        assert isinstance(handle, int)
        self.released.append(handle)


@dataclass
class PlayedPool:
    played: Played
    peer: str

    def copy(self, table: CopyTable) -> Callable[[], bool]:
        return self.played.launch(self.peer, table)

    def close(self) -> None:
        raise AssertionError("a queue closes nothing")


class Stage:
    def __init__(self) -> None:
        self.played, self.counters = Played(), Counters()
        self.queue = DirectQueue(self.played, self.counters)  # type: ignore[arg-type]
        self.links = {name: Link(name, ADDRESS, PlayedPool(self.played, name)) for name in ("a", "b")}

    def add(self, notice: str, *, peer: str = "a", num_bytes: int = 64) -> DirectWrite:
        table = np.array([(0, 0, 32), (1024, 4096, num_bytes - 32)], dtype=np.int64)
        return self.queue.add(self.links[peer], table, num_bytes, notice.encode())


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_parts_leave_at_once_while_little_is_launched_and_together_when_the_device_is_busy(stage: Stage) -> None:
    writes = [stage.add(f"n{at}") for at in range(6)]
    assert stage.played.launched == [("a", [48]), ("a", [48])]

    stage.played.ended = 1
    stage.queue.advance()
    last = Copy(1024 + 16, 4096 + 16, 16)
    assert stage.played.launched[2:] == [("a", [64, 64, 64, 48])]
    assert stage.played.tails == [("a", [last], [b"n0"])]
    assert [write.runs for write in writes] == [False, *[True] * 5]

    stage.played.ended = 3
    stage.queue.advance()
    assert stage.played.tails[1:] == [("a", [last, last], [b"n1", b"n2", b"n3", b"n4", b"n5"])]
    assert stage.counters.values == {"parts_direct_total": 6, "direct_bytes_total": 6 * 64 - 3 * 16}
    assert stage.links["a"].in_flight == 0


def test_what_becomes_of_the_last_bytes_becomes_of_every_part_that_they_stand_for(stage: Stage) -> None:
    first, *others = (stage.add(f"n{at}") for at in range(4))
    others.append(stage.add("n4", num_bytes=96))
    stage.played.ended = 1
    stage.queue.advance()
    stage.played.ended = 3
    stage.queue.advance()
    assert stage.queue.poll(first) is PENDING
    assert len(stage.played.tails) == 2

    stage.played.progress = {0: Failed("dead"), 1: Done(32)}
    stage.queue.advance()
    assert stage.queue.poll(first) == Failed("dead")
    assert [stage.queue.poll(write) for write in others] == [*[Done(64)] * 3, Done(96)]
    assert stage.played.released == [0, 1]


def test_a_batch_is_of_one_peer_and_each_peers_parts_keep_their_order(stage: Stage) -> None:
    for at, peer in enumerate("aabababb"):
        stage.add(f"{at}", peer=peer)
    assert [(peer, len(parts)) for peer, parts in stage.played.launched] == [("a", 1), ("a", 1)]
    stage.played.ended = 100
    for _ in range(3):
        stage.queue.advance()

    assert [(peer, len(parts)) for peer, parts in stage.played.launched[2:]] == [("b", 4), ("a", 2)]
    told = [(peer, [int(notice) for notice in notices]) for peer, _, notices in stage.played.tails]
    assert told == [("a", [0, 1]), ("b", [2, 4, 6, 7]), ("a", [3, 5])]


def test_a_batch_has_its_bounds(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_queue, "_MOST_BYTES", 200)
    monkeypatch.setattr(direct_queue, "_MOST_PARTS", 3)
    for at in range(2):
        stage.add(f"{at}")
    for at, num_bytes in enumerate((400, 64, 64, 64, 64, 64, 128, 64)):
        stage.add(f"{2 + at}", num_bytes=num_bytes)
    stage.played.ended = 100
    for _ in range(6):
        stage.queue.advance()

    assert [len(parts) for _, parts in stage.played.launched] == [1, 1, 1, 3, 2, 2]
    told = [int(notice) for _, _, notices in stage.played.tails for notice in notices]
    assert told == list(range(10))


def test_a_part_waits_for_others_of_its_round_while_enough_is_launched(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_queue, "_ENOUGH_BYTES", 100)
    for at in range(4):
        stage.add(f"{at}", num_bytes=128)
    assert [len(parts) for _, parts in stage.played.launched] == [1]

    stage.queue.advance()
    assert [len(parts) for _, parts in stage.played.launched] == [1, 3]

    stage.played.ended = 2
    for at in range(4):
        stage.add(f"{4 + at}", num_bytes=128)
        assert len(stage.played.launched) == (3 if at == 3 else 2), "the device is asked when four wait"
    assert stage.played.tails == [], "nothing is written between two rounds of polls"


def test_parts_that_no_kernel_may_copy_are_left_to_the_other_transport_one_by_one(stage: Stage) -> None:
    for at in range(2):
        stage.add(f"{at}")
    outside = stage.queue.add(stage.links["a"], np.array([(0, 0, 32), (0, 1 << 41, 32)]), 64, b"outside")
    beside = stage.add("beside")
    stage.played.ended, stage.played.progress = 2, {0: Failed("outside"), 1: Done(64), 2: Done(32)}
    stage.queue.advance()

    assert len(stage.played.launched) == 2
    assert [(len(copies), notices) for _, copies, notices in stage.played.tails] == [
        (2, [b"outside"]), (2, [b"beside"]), (2, [b"0", b"1"]),
    ]  # fmt: skip
    assert [stage.queue.poll(write) for write in (outside, beside)] == [Failed("outside"), Done(64)]
    assert stage.counters.values == {"parts_direct_total": 2, "direct_bytes_total": 2 * 64 - 2 * 16}
    assert stage.links["a"].in_flight == 0


def test_a_launch_that_is_refused_fails_its_parts_alone(stage: Stage) -> None:
    running = [stage.add(f"n{at}") for at in range(2)]
    lost = [stage.add(f"n{at}") for at in range(2, 4)]
    stage.played.refuses, stage.played.ended = True, 2
    stage.queue.advance()
    stage.played.refuses = False
    later = stage.add("later")
    stage.played.ended, stage.played.progress = 3, {0: Done(32), 1: Done(16)}
    stage.queue.advance()

    assert [stage.queue.poll(write) for write in lost] == [Failed("refused")] * 2
    assert [stage.queue.poll(write) for write in (*running, later)] == [Done(64)] * 3
    assert stage.links["a"].in_flight == 0
    assert stage.queue.unsettled("a") == []


def test_a_peer_that_has_gone_fails_the_parts_of_its_batches(stage: Stage) -> None:
    writes = [stage.add(f"n{at}") for at in range(5)] + [stage.add("other", peer="b")]
    stage.played.gone, stage.played.ended = {"a"}, 100
    stage.played.progress = {0: Done(16)}
    for _ in range(3):
        stage.queue.advance()

    assert [stage.queue.poll(write) for write in writes] == [*[Failed("a is gone")] * 5, Done(64)]


def test_what_is_unsettled_waits_or_runs_or_has_not_been_announced(stage: Stage) -> None:
    writes = [stage.add(f"n{at}") for at in range(4)]
    other = stage.add("n", peer="b")
    assert set(map(id, stage.queue.unsettled("a"))) == set(map(id, writes))
    assert stage.queue.unsettled("b") == [other]

    stage.played.ended = 1
    stage.queue.advance()
    assert set(map(id, stage.queue.unsettled("a"))) == set(map(id, writes[1:]))


def test_the_device_is_asked_once_while_all_parts_are_polled_in_turn_whoever_asks(stage: Stage) -> None:
    writes = [stage.add(f"n{at}") for at in range(30)]
    stage.played.asked = 0
    for _ in range(10):
        for write in writes:
            assert stage.queue.poll(write) is PENDING
    assert stage.played.asked == 10

    for _ in range(10):
        assert stage.queue.poll(writes[-1]) is PENDING
    assert stage.played.asked in (19, 20)
