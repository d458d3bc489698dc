"""How far the step thread runs ahead of a GPU: while one chunk computes, the next one is queued behind it; of a chunk
whose layers are long, only the next layer, and that while the device is at the feed-forward of the one before.

Nothing between two chunks or layers then leaves the device idle. Further ahead it must not run: a request that is given
up, or that shall give way, would go on for as long, and the times of chunks would be learned late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
class Part:
    """What was launched of a chunk at once: all of it, or the layers between two pauses."""

    began: Event
    ended: Event


@dataclass(frozen=True, slots=True)
class _Launched:
    tokens: Span | None  # None: it was left on its way, so its time says nothing yet
    parts: Sequence[Part]  # all of the chunk; the last one is the one that was launched

    @property
    def ended(self) -> Event:
        return self.parts[-1].ended


class DeviceQueue:
    """The chunks that were launched on one device. Used by the thread that launches them."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._unfinished: deque[_Launched] = deque()
        self._attended: Event | None = None  # the last long layer has got so far
        self._timed: list[TimedChunk] = []
        self._num_launched = 0
        self._began: Event | None = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceQueue | None:
        """Return the queue of a GPU; None for a CPU, which has done a chunk when it has been asked to."""
        if device.type != "cuda":
            return None
        return cls(lambda: torch.cuda.Event(enable_timing=True, blocking=True))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Wait until the next chunk may be launched."""
        self._collect()
        while len(self._unfinished) > _MOST_UNFINISHED:
            self._unfinished[0].ended.synchronize()
            self._collect()
        self._began = self._new_event()
        self._began.record()

    def await_layer(self) -> None:
        """Wait until the next long layer may be launched."""
        if self._attended is not None:
            self._attended.synchronize()
            self._attended = None

    def attended(self) -> None:
        """Note that a long layer's attention has been launched, and what comes behind it has not."""
        self._attended = self._new_event()
        self._attended.record()

    def end(self, tokens: Span | None, *, earlier: Sequence[Part] = ()) -> tuple[int, Part]:
        """Note that all that is launched of the chunk for now has been; return its number, for `has_ended`, and it.

        Args:
            tokens: of the chunk; None: it was left on its way, for good or for now.
            earlier: parts of the chunk that were launched before; its time is theirs and that of this one.
        """
        assert self._began is not None, "a chunk begins first"
        ended = self._new_event()
        ended.record()
        part = Part(self._began, ended)
        self._unfinished.append(_Launched(tokens, (*earlier, part)))
        self._began = None
        self._num_launched += 1
        return self._num_launched, part

    def has_ended(self, number: int) -> bool:
        """Say whether the device is through with a chunk, and with all before it."""
        self._collect()
        return number <= self._num_launched - len(self._unfinished)

    def has_reached(self) -> bool:
        """Say whether the device is through with all chunks before the one that is being launched."""
        self._collect()
        return not self._unfinished

    def take_timed(self) -> list[TimedChunk]:
        """Return the chunks that have ended since the last call."""
        self._collect()
        timed, self._timed = self._timed, []
        return timed

    def _collect(self) -> None:
        while self._unfinished and self._unfinished[0].ended.query():
            done = self._unfinished.popleft()
            if done.tokens is not None:
                took_ms = sum(part.began.elapsed_time(part.ended) for part in done.parts)
                self._timed.append(TimedChunk(done.tokens, took_ms / 1e3))


def to_device(numbers: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return numbers on a device, without a wait for what the device still computes."""
    made = torch.from_numpy(numbers)
    if device.type != "cuda":
        return made
    return made.pin_memory().to(device, non_blocking=True)
