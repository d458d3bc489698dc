"""Calls at times that do not wait for the answers to earlier ones, as clients' do not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def poisson(rate: float, duration_s: float, *, seed: int) -> list[float]:
    """Return arrival times in [0, duration_s) at so many per second on average; at least one."""
    rng, times, at_s = random.Random(seed), list[float](), 0.0  # noqa: S311 - a workload, not a secret
    while (at_s := at_s + rng.expovariate(rate)) < duration_s:
        times.append(at_s)
    return times or [0.0]


async def run(times_s: Sequence[float], call: Callable[[int, float], Awaitable[Result]]) -> list[Result]:
    """Begin each call at its time; return what they gave, in order.

    Args:
        call: takes its number and when it was due (time.perf_counter): what makes it begin late is part of its time.
    """
    began_s = time.perf_counter()
    tasks = []
    for number, at_s in enumerate(times_s):
        due_s = began_s + at_s
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.ensure_future(call(number, due_s)))
    return list(await asyncio.gather(*tasks))
