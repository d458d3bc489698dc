"""Times of several kernels side by side: in turn, repetition by repetition, by the device's own events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each repetition of one kernel."""

    repetitions_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.repetitions_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "median_us": round(self.median_s * 1e6, 2),
            "repetitions_us": [round(time_s * 1e6, 2) for time_s in self.repetitions_s],
        }


def recorded(work: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of `work` as one CUDA graph, which is how a decode step runs it."""
    for _ in range(WARM_UP_CALLS):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def side_by_side(
    works: Mapping[str, Callable[[], object]], *, repetitions: int, calls_per_work: int = 1
) -> dict[str, Times]:
    """Return the times of one call each; `calls_per_work` is how many calls one work makes."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        for _ in range(WARM_UP_CALLS):
            work()
    for number in range(repetitions):
        names = list(works) if number % 2 == 0 else list(works)[::-1]  # neither always runs on a warmer device
        for name in names:
            begin, end = _event(), _event()
            begin.record()
            works[name]()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e-3 / calls_per_work)
    return {name: Times(tuple(times)) for name, times in found.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
