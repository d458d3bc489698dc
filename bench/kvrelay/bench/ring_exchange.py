"""How much of a ring's communication does not hide behind its attention, and what one layer looks like in time.

What is exposed is the time of a layer with its exchanges, minus that of the same work without them: the same kernels
over rows of the same size that are there already. Both are taken in turns in one run.

Shapes in this file: B rows of a block, W latent row.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvrelay.bench.device_rates import synchronize, timed_s
from kvrelay.prefill_node.group import Exchange, Header, RingGroup

_KINDS = (("nccl", "exchange"), ("flash", "attention"), ("fmha", "attention"), ("sdpa", "attention"))


class Unconnected(RingGroup):
    """A rank whose exchanges bring nothing: what comes in is noise that lies there already."""

    def __init__(self, group: RingGroup) -> None:
        self.rank, self.size = group.rank, group.size
        self._filled: set[int] = set()

    def post(self, block_BW: Tensor, incoming_BW: Tensor, header: Header | None) -> Exchange:
        if incoming_BW.data_ptr() not in self._filled:  # zeros would make the kernels faster than they are
            incoming_BW.normal_()
            self._filled.add(incoming_BW.data_ptr())
        return Exchange([], None if header is None else header.pack())


def in_turns_s(
    ways: Sequence[Callable[[], object]], group: RingGroup, device: torch.device, *, layers: int, rounds: int
) -> list[list[float]]:
    """Return, per way, the seconds a layer takes until the last rank is through, for each round."""

    def until_all(way: Callable[[], object]) -> None:
        for _ in range(layers):
            way()
        synchronize(device)
        group.barrier()

    for way in ways:
        way()
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, times in zip(ways, taken, strict=True):
            group.barrier()
            times.append(timed_s(partial(until_all, way), device) / layers)
    return taken


def exposure(with_s: Sequence[float], without_s: Sequence[float], only_s: Sequence[float]) -> dict[str, Any]:
    """Return what is exposed, over the layer's time and over the exchange's own.

    Args:
        only_s: the exchange alone, with nothing to hide behind.
    """
    exposed_s = [a - b for a, b in zip(with_s, without_s, strict=True)]
    layer_s, own_s = statistics.median(with_s), statistics.median(only_s)
    return {
        "with_exchange_ms": [round(one * 1e3, 4) for one in with_s],
        "without_exchange_ms": [round(one * 1e3, 4) for one in without_s],
        "exchange_alone_ms": [round(one * 1e3, 4) for one in only_s],
        "exposed_over_layer": round(statistics.median(exposed_s) / layer_s, 5),
        "exposed_over_exchange": round(statistics.median(exposed_s) / own_s, 4),
    }


def timeline(way: Callable[[], object], group: RingGroup, device: torch.device, *, layers: int) -> dict[str, Any]:
    """Return the device's kernels in a few layers: stream, kind, begin and length in ms, and how much of the exchange
    no other kernel covers. All ranks call it; without a GPU there are no kernels."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    group.barrier()
    with profile(activities=activities) as seen:
        for _ in range(layers):
            way()
        synchronize(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = sorted(
        (one["ts"], one["dur"], one["args"].get("stream", 0), one["name"])
        for one in events
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    first = kernels[0][0] if kernels else 0.0
    found = [
        {"stream": stream, "kind": _kind(name), "at_ms": round((at - first) / 1e3, 4), "ms": round(took / 1e3, 4)}
        for at, took, stream, name in kernels
    ]
    return {"layers": layers, "kernels": found, **uncovered(found)}


def _kind(name: str) -> str:
    return next((kind for part, kind in _KINDS if part in name.lower()), "other")


def uncovered(kernels: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the time of the exchange's kernels, the part of it beside which no other ran, and the whole span."""
    exchange = _joined(one for one in kernels if one["kind"] == "exchange")
    compute = _joined(one for one in kernels if one["kind"] != "exchange")
    total = sum(end - begin for begin, end in exchange)
    covered = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in exchange
        for other_begin, other_end in compute
    )
    span = max((one["at_ms"] + one["ms"] for one in kernels), default=0.0)
    return {
        "exchange_ms": round(total, 4),
        "uncovered_ms": round(total - covered, 4),
        "span_ms": round(span, 4),
    }


def _joined(kernels: Any) -> list[tuple[float, float]]:
    """Return the times at which at least one of these kernels ran, as intervals that do not touch."""
    intervals: list[tuple[float, float]] = []
    for begin, end in sorted((one["at_ms"], one["at_ms"] + one["ms"]) for one in kernels):
        if intervals and begin <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], end)
        else:
            intervals.append((begin, end))
    return intervals
