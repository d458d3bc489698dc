"""How far chunks are launched ahead of a device, on one that is played."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.core.shard import Span
from kvrelay.prefill_node.device_queue import DeviceQueue, TimedChunk, to_device


class Played:
    """An event; the device has reached all up to its stream's number `reached`, one a second."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.number = 0

    def record(self) -> None:
        self._stream.recorded += 1
        self.number = self._stream.recorded

    def query(self) -> bool:
        return self.number <= self._stream.reached

    def synchronize(self) -> None:
        self._stream.waited.append(self.number)
        self._stream.reached = max(self._stream.reached, self.number)

    def elapsed_time(self, later: Played, /) -> float:
        assert self.query()
        assert later.query()
        return 1e3 * (later.number - self.number)


class Stream:
    def __init__(self) -> None:
        self.recorded = self.reached = 0
        self.waited: list[int] = []
        self.queue = DeviceQueue(lambda: Played(self))

    def launch(self, tokens: Span, *, stopped: bool = False) -> int:
        self.queue.begin()
        number, _ = self.queue.end(None if stopped else tokens)
        return number


CHUNKS = [Span(10 * number, 10 * number + 10) for number in range(4)]


def test_one_chunk_computes_and_one_is_queued_behind_it() -> None:
    stream = Stream()
    stream.launch(CHUNKS[0])
    stream.launch(CHUNKS[1])
    assert stream.waited == []

    stream.launch(CHUNKS[2])

    assert stream.waited == [2]  # the end of the first
    assert stream.queue.take_timed() == [TimedChunk(CHUNKS[0], 1.0)]


def test_nothing_is_waited_for_that_has_ended() -> None:
    stream = Stream()
    for chunk in CHUNKS:
        stream.launch(chunk)
        stream.reached = stream.recorded
    assert stream.waited == []
    assert [chunk.tokens for chunk in stream.queue.take_timed()] == CHUNKS
    assert stream.queue.take_timed() == []


def test_a_chunk_that_was_stopped_is_waited_for_and_teaches_nothing() -> None:
    stream = Stream()
    number = stream.launch(CHUNKS[0], stopped=True)
    assert stream.queue.has_ended(0)
    assert not stream.queue.has_ended(number)
    stream.reached = stream.recorded
    assert stream.queue.has_ended(number)
    assert stream.queue.take_timed() == []


def test_a_chunk_that_has_ended_is_told_from_those_behind_it() -> None:
    stream = Stream()
    first, second = stream.launch(CHUNKS[0]), stream.launch(CHUNKS[1])
    stream.reached = 2
    assert stream.queue.has_ended(first)
    assert not stream.queue.has_ended(second)


def test_the_device_reaches_a_chunk_when_it_is_through_with_those_before() -> None:
    stream = Stream()
    stream.queue.begin()
    assert stream.queue.has_reached()
    stream.queue.end(CHUNKS[0])

    stream.queue.begin()
    assert not stream.queue.has_reached()
    stream.reached = 2  # the end of the first
    assert stream.queue.has_reached()


def test_a_cpu_has_no_queue_and_numbers_stay_where_they_are() -> None:
    cpu = torch.device("cpu")
    assert DeviceQueue.of(cpu) is None
    numbers = np.arange(5)
    assert to_device(numbers, cpu).data_ptr() == numbers.ctypes.data


def test_the_time_of_a_chunk_in_parts_is_that_of_its_parts() -> None:
    stream = Stream()
    stream.queue.begin()
    _, part = stream.queue.end(None)
    stream.launch(CHUNKS[1])
    stream.queue.begin()
    stream.queue.end(CHUNKS[0], earlier=[part])
    stream.reached = stream.recorded

    assert stream.queue.take_timed() == [TimedChunk(CHUNKS[1], 1.0), TimedChunk(CHUNKS[0], 2.0)]


def test_a_long_layer_is_launched_once_the_device_is_behind_the_attention_of_the_one_before() -> None:
    stream = Stream()
    for layer in range(3):
        stream.queue.await_layer()
        assert stream.waited == list(range(1, layer + 1))
        stream.queue.attended()

    stream.queue.await_layer()
    stream.queue.await_layer()  # of a layer that is not long nothing is known

    assert stream.waited == [1, 2, 3]
