"""How far the step thread runs ahead of a GPU: while one chunk computes, the next one is queued behind it.

Nothing between two chunks then leaves the device idle. Further ahead it must not run: a request that is given up would
go on for as many chunks, and the times of chunks would be learned late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrelay.core.shard import Span

_MOST_UNFINISHED = 1  # chunks in front of the one that is launched


class Event(Protocol):
    """What a stream reaches in its turn; torch.cuda.Event with times is one."""

    def record(self) -> object: ...

    def query(self) -> bool: ...

    def synchronize(self) -> object: ...

    def elapsed_time(self, later: Any, /) -> float:
        """Return the ms from this event to a later one; both must have been reached."""
        ...


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """What a chunk took on its device."""

    tokens: Span
    took_s: float


@dataclass(frozen=True, slots=True)
class _Launched:
    tokens: Span | None  # None: it was stopped on its way, so its time says nothing
    began: Event
    ended: Event


class DeviceQueue:
    """The chunks that were launched on one device. Used by the thread that launches them."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._unfinished: deque[_Launched] = deque()
        self._timed: list[TimedChunk] = []
        self._num_launched = 0
        self._began: Event | None = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceQueue | None:
        """Return the queue of a GPU; None for a CPU, which has done a chunk when it has been asked to."""
        if device.type != "cuda":
            return None
        return cls(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Wait until the next chunk may be launched."""
        self._collect()
        while len(self._unfinished) > _MOST_UNFINISHED:
            self._unfinished[0].ended.synchronize()
            self._collect()
        self._began = self._new_event()
        self._began.record()

    def end(self, tokens: Span, *, stopped: bool) -> int:
        """Note that all of the chunk's work has been launched; return its number, for `has_ended`."""
        assert self._began is not None, "a chunk begins first"
        ended = self._new_event()
        ended.record()
        self._unfinished.append(_Launched(None if stopped else tokens, self._began, ended))
        self._began = None
        self._num_launched += 1
        return self._num_launched

    def has_ended(self, number: int) -> bool:
        """Say whether the device is through with a chunk, and with all before it."""
        self._collect()
        return number <= self._num_launched - len(self._unfinished)

    def take_timed(self) -> list[TimedChunk]:
        """Return the chunks that have ended since the last call."""
        self._collect()
        timed, self._timed = self._timed, []
        return timed

    def _collect(self) -> None:
        while self._unfinished and self._unfinished[0].ended.query():
            done = self._unfinished.popleft()
            if done.tokens is not None:
                self._timed.append(TimedChunk(done.tokens, done.began.elapsed_time(done.ended) / 1e3))


def to_device(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return numbers on a device, without a wait for what the device still computes."""
    made = torch.from_numpy(numbers)
    if device.type != "cuda":
        return made
    return made.pin_memory().to(device, non_blocking=True)
