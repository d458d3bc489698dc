"""Requirements of kvrelay.prefill_node.chunk_watch: when the chunk in work is left, and what is learned of it."""

from __future__ import annotations

import dataclasses

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.types import Counters
from kvrelay.prefill_node.chunk_watch import ChunkWatch
from kvrelay.prefill_node.giving_way import Turn
from kvrelay.prefill_node.group import Leave
from kvrelay.proto.v1 import ring_pb2
from played_ring import CHUNK, Ring, a_job

LAYERS = 10
LAYER_S = 0.1


class Watched:
    """A ring whose long prompt is in work, and the watch over it."""

    def __init__(self, *, pages: int = 64, is_ring: bool = False, give_way_s: float = 0.01) -> None:
        self.ring = Ring(pages=pages)
        self.clock, self.counters = ManualClock(), Counters()
        self.commands = False
        self.is_reached = True
        self.told = 0
        self.watch = ChunkWatch(
            self.ring.control,
            is_ring=is_ring,
            give_way_s=give_way_s,
            any_command=lambda: self.commands,
            reached=lambda: self.is_reached,
            counters=self.counters,
            clock=self.clock,
        )
        self.ring.control.submit(a_job("long", CHUNK, prefix=9), 0.0)
        self.begin()

    def begin(self) -> ring_pb2.RingStep:
        step = self.ring.control.plan(self.clock())
        self.watch.begin(step, self._tell)
        return step

    def _tell(self) -> None:
        self.told += 1

    def layers(self, first: int = 0) -> tuple[Leave, int]:
        """Compute layers until the chunk is left; return why, and before which layer."""
        for layer in range(first, LAYERS):
            if (leave := self.watch.ask(layer, LAYERS)) is not Leave.NO:
                return leave, layer
            self.clock.advance(LAYER_S)
        return Leave.NO, LAYERS

    def end(self, layers_left: int | None = None) -> Turn:
        reports = [ring_pb2.RankReport(layers_left=layers_left)]
        turn = self.watch.end(reports, None)
        self.ring.control.applied(reports, turn)
        return turn


def test_a_short_prompt_that_comes_meanwhile_is_given_way_to_behind_the_first_layer() -> None:
    watched = Watched()
    watched.watch.arriving["short#1"] = a_job("short", 20, prefix=1)

    assert watched.layers() == (Leave.PAUSE, 1)
    turn = watched.end(layers_left=9)

    assert turn == Turn(turn.took_s, LAYERS, "short#1")
    assert turn.took_s == pytest.approx(LAYER_S)
    assert watched.told == 1
    watched.ring.control.submit(watched.watch.arriving.pop("short#1"), watched.clock())
    assert watched.begin().chunk.request_id == "short#1"
    watched.clock.advance(0.03)
    watched.end()
    again = watched.begin().chunk
    assert (again.request_id, again.resumes, again.packed_ids) == ("long#1", True, b"")
    assert watched.counters.values == {"chunk_pauses_total": 1.0, "chunk_paused_s_total": pytest.approx(0.03)}


@pytest.mark.parametrize("change", ["switched off", "as long", "no room", "its prefix is in work", "last layer"])
def test_a_chunk_goes_on_when_nothing_would_be_gained(change: str) -> None:
    watched = Watched(
        pages=5 if change == "no room" else 64,
        give_way_s=0.0 if change == "switched off" else 0.01,
        is_ring=change == "last layer",
    )
    job = a_job("short", CHUNK if change == "as long" else 20, prefix=1)
    if change == "its prefix is in work":
        job = a_job("short", 40, prefix=9)
    first = LAYERS - 2 if change == "last layer" else 0
    watched.watch.arriving["short#1"] = job

    assert watched.layers(first) == (Leave.NO, LAYERS)


def test_a_prompt_of_which_most_is_cached_is_short() -> None:
    watched = Watched()
    ring = watched.ring
    watched.layers()
    watched.end()
    ring.control.submit(a_job("first", 2 * CHUNK, prefix=1), 0.0)
    ring.run()
    ring.control.submit(a_job("long", CHUNK, prefix=8, attempt=2), 0.0)
    watched.begin()

    watched.watch.arriving["again#1"] = a_job("again", 2 * CHUNK + 10, prefix=1)

    assert watched.layers() == (Leave.PAUSE, 1)


def test_a_chunk_has_its_share_before_it_gives_way_again() -> None:
    watched = Watched()
    short_s = 3 * 3.5 * LAYER_S
    watched.watch.arriving["short#1"] = a_job("short", 20, prefix=1)
    watched.layers()
    watched.end(layers_left=9)
    watched.ring.control.submit(watched.watch.arriving.pop("short#1"), watched.clock())
    watched.begin()
    watched.clock.advance(short_s)
    watched.end()

    watched.begin()
    watched.watch.arriving["next#1"] = a_job("next", 10, prefix=2)

    assert watched.layers(first=1) == (Leave.PAUSE, 1 + 4)


def test_what_a_device_still_computes_of_the_turn_before_is_that_turn_s_time() -> None:
    watched = Watched()
    watched.watch.arriving["short#1"] = a_job("short", 20, prefix=1)
    watched.layers()
    watched.end(layers_left=9)
    watched.ring.control.submit(watched.watch.arriving.pop("short#1"), watched.clock())
    watched.begin()
    watched.end()  # launched, in no time

    watched.is_reached = False
    watched.begin()
    watched.watch.arriving["next#1"] = a_job("next", 10, prefix=2)
    assert watched.watch.ask(1, LAYERS) is Leave.NO
    watched.clock.advance(3 * 3.5 * LAYER_S)  # until the next layer may be launched
    watched.is_reached = True

    assert watched.layers(first=2) == (Leave.PAUSE, 2 + 4)
    assert watched.end(layers_left=4).took_s == pytest.approx(4 * LAYER_S)


def test_a_chunk_that_is_launched_behind_others_has_taken_nothing_yet() -> None:
    watched = Watched()
    watched.layers()
    watched.end()
    watched.is_reached = False
    watched.ring.control.submit(a_job("other", 20, prefix=2), 0.0)
    watched.begin()
    assert watched.layers() == (Leave.NO, LAYERS)
    assert watched.end().took_s == 0.0


def test_a_step_ends_in_half_a_second_when_somebody_waits_for_its_end() -> None:
    watched = Watched()
    watched.commands = True
    assert watched.layers() == (Leave.PAUSE, 5)
    assert watched.end(layers_left=5).favoured is None
    watched.commands = False
    assert watched.begin().chunk.resumes
    assert watched.layers(first=5) == (Leave.NO, LAYERS)
    assert "chunk_pauses_total" not in watched.counters.values


def test_a_cancelled_prompt_s_chunk_is_stopped_at_once() -> None:
    watched = Watched()
    watched.watch.cancelled.add("long#1")
    assert watched.layers() == (Leave.STOP, 0)
    watched.watch.forget("long#1")
    assert watched.watch.cancelled == set()


def test_a_prompt_that_is_given_up_while_its_chunk_is_paused_was_left_for_nobody_and_is_forgotten() -> None:
    watched = Watched()
    watched.watch.arriving["short#1"] = a_job("short", 20, prefix=1)
    watched.layers()
    watched.end(layers_left=9)
    watched.ring.control.close("long#1", abort=True)
    assert not watched.begin().HasField("chunk")
    watched.watch.forget("long#1")
    watched.ring.control.submit(watched.watch.arriving.pop("short#1"), watched.clock())

    assert watched.begin().chunk.request_id == "short#1"
    assert watched.watch._left_at_s == {}
    assert watched.counters.values == {}


def test_the_time_of_a_paused_chunk_is_that_of_its_parts() -> None:
    watched = Watched()
    seen: list[float] = []
    watched.watch.times.observe = lambda took_s, **_: seen.append(took_s)  # type: ignore[method-assign]
    watched.commands = True
    _, left_at = watched.layers()
    watched.end(layers_left=LAYERS - left_at)
    assert seen == []
    watched.clock.advance(7.0)
    watched.begin()
    watched.layers(first=9)
    watched.end()
    assert seen == pytest.approx([6 * LAYER_S])


def test_a_prompt_that_may_not_come_is_none_to_give_way_to() -> None:
    watched = Watched()
    for number in range(7):
        watched.ring.control.submit(a_job(f"more{number}", CHUNK, prefix=20 + number), 0.0)
    watched.watch.arriving["short#1"] = dataclasses.replace(a_job("short", 20, prefix=1))
    assert watched.layers() == (Leave.NO, LAYERS)
