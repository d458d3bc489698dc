"""The yardstick of idling: a process that polls is refused on any machine, one that waits is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import idle
from idle import Waiting, assert_idle


@contextmanager
def process(code: str) -> Iterator[int]:
    """Run a program that says a word when it has started and goes on for ever; yield its id."""
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    started.stdout.readline()
    yield started.pid
    started.kill()
    started.communicate()


LOOP = "import time; print('started', flush=True)\nwhile True: {}"


def test_a_process_that_waits_is_idle() -> None:
    with process(LOOP.format("time.sleep(0.1)")) as pid:
        assert_idle({"it": Waiting([pid], 0.02)}, window_s=0.5)


@pytest.mark.parametrize("dear", [1.0, 1e-3])
def test_a_poll_each_millisecond_is_found_however_dear_a_wake_up_is(
    monkeypatch: pytest.MonkeyPatch, dear: float
) -> None:
    monkeypatch.setattr(idle, "_USUAL_WAKEUP_S", idle._USUAL_WAKEUP_S * dear)
    with (
        process(LOOP.format("time.sleep(0.001)")) as pid,
        pytest.raises(AssertionError, match=f"process {pid} woke up"),
    ):
        assert_idle({"it": Waiting([pid], 0.02)}, window_s=0.5)


def test_a_process_that_never_sleeps_is_found_by_its_cpu_time() -> None:
    with process(LOOP.format("pass")) as pid, pytest.raises(AssertionError, match="it used"):
        assert_idle({"it": Waiting([pid], 0.02)}, window_s=0.5)
