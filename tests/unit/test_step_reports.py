"""When the step thread says what it did: once per step, while the device computes the next one, and in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

from kvrelay.core.types import SampledToken
from kvrelay.decode_node.runner import Joined, Left, Stepped, StepThread
from kvrelay.decode_node.scheduler import Sequence

JOINED = Joined.__name__


class Device:
    """Given a step it computes beside the thread, as a GPU does; also the event loop that is told. Notes the order."""

    def __init__(self, *, num_tokens: int) -> None:
        self.runs_beside = True
        self.happened: list[str] = []
        self.ended = threading.Event()
        self.on_launch: Callable[[int], object] = lambda _: None
        self._num_launched = 0
        self.thread = StepThread(cast("Any", self), max_batch=8, loop=cast("Any", self), on_report=lambda _: None)
        for key in range(3):
            self.thread.join(Sequence(key, 5, 1, num_tokens, frozenset()), cast("Any", None))

    def bind_thread(self) -> None:
        pass

    def step(self, batch: Any, states: Any, *, meanwhile: Callable[[], None]) -> list[SampledToken]:
        self.happened.append("launch")
        meanwhile()
        self.on_launch(self._num_launched)
        self._num_launched += 1
        return [SampledToken(7)] * len(batch)

    def call_soon_threadsafe(self, _: Callable[..., object], report: object) -> None:
        self.happened.append(type(report).__name__)
        if isinstance(report, Stepped) and report.chosen[0].finish is not None:
            self.ended.set()

    def run(self) -> list[str]:
        self.thread.start()
        assert self.ended.wait(10)
        self.thread.stop()
        return [one for one in self.happened if one != JOINED]


def test_a_step_is_told_once_and_behind_the_launch_of_the_next_one() -> None:
    assert Device(num_tokens=4).run() == [
        "launch", "launch", "Stepped", "launch", "Stepped", "launch", "Stepped", "Stepped",
    ]  # fmt: skip


def test_who_joins_hears_of_it_behind_the_launch_of_the_first_step() -> None:
    device = Device(num_tokens=1)
    device.run()
    assert device.happened[:4] == ["launch", JOINED, JOINED, JOINED]
    cpu = Device(num_tokens=1)
    cpu.runs_beside = False
    cpu.run()
    assert cpu.happened[:4] == [JOINED, JOINED, JOINED, "launch"]


def test_where_nothing_computes_beside_the_thread_a_step_is_told_at_once() -> None:
    cpu = Device(num_tokens=3)
    cpu.runs_beside = False
    assert cpu.run() == ["launch", "Stepped", "launch", "Stepped", "launch", "Stepped"]


def test_who_leaves_hears_of_the_step_before() -> None:
    device = Device(num_tokens=3)
    device.on_launch = lambda number: device.thread.leave(2) if number == 0 else None
    assert device.run() == ["launch", "Stepped", Left.__name__, "launch", "launch", "Stepped", "Stepped"]


def test_the_time_of_each_step_is_learned() -> None:
    device = Device(num_tokens=40)
    device.run()
    fitted = device.thread.step_times.fitted
    assert fitted is not None
    assert fitted.observations == 40
