"""Load that does not wait for answers."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvrelay.bench import open_loop


def test_arrivals_have_the_rate_and_the_seed_that_were_asked_for() -> None:
    times_s = open_loop.poisson(100.0, 20.0, seed=1)

    assert len(times_s) == pytest.approx(2000, rel=0.1)
    assert times_s == sorted(times_s) == open_loop.poisson(100.0, 20.0, seed=1)
    assert times_s != open_loop.poisson(100.0, 20.0, seed=2)
    assert open_loop.poisson(0.001, 1.0, seed=1) == [0.0]


async def test_a_slow_answer_delays_no_later_call_and_lateness_counts() -> None:
    last_begun = asyncio.Event()

    async def call(number: int, due_s: float) -> float:
        if number == 0:
            await last_begun.wait()
            await asyncio.sleep(0.3)
        if number == 2:
            last_begun.set()
        return time.perf_counter() - due_s

    taken_s = await asyncio.wait_for(open_loop.run([0.0, 0.02, 0.04], call), 20)

    assert taken_s[0] >= 0.3
