"""A bug in a task, a callback or a thread of a process reaches the one place that ends the process."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.supervise import keep, watch_loop, watch_threads
from repo import ROOT

LONG_RUNNING = ("core", "proto", "index", "router", "kv_transfer", "prefill_node", "decode_node")
TASKS_OTHERS_LOOK_AFTER = {
    "supervise.py",  # keep itself
    "legs.py",  # a stream's end by a bug is told to its request
    "attempt.py",  # last words of one request: logged by the loop
    "attach_stream.py",  # what one peer says; its end ends the stream
    "registration.py",  # a task group
    "app.py",  # waits for events
    "drain.py",  # waits for events
    "servicer.py",  # a pull: its request waits for it and raises what it raised
}


@pytest.fixture(autouse=True)
def _the_hook_is_put_back() -> Iterator[None]:
    kept = threading.excepthook
    yield
    threading.excepthook = kept


async def _bugs_of(start: Callable[[], object]) -> list[str]:
    bugs: list[str] = []
    watch_loop(asyncio.get_running_loop(), bugs.append)
    held = start()
    await asyncio.sleep(0.02)
    del held
    return bugs


async def _raise() -> None:
    raise KeyError("no such page")


async def test_a_bug_in_a_kept_task_is_told_at_once_although_the_task_is_held() -> None:
    assert await _bugs_of(lambda: keep(_raise(), name="heartbeat")) == [
        "the task heartbeat was ended by a bug: KeyError: 'no such page'"
    ]


async def test_a_kept_task_may_return_and_may_be_cancelled() -> None:
    assert await _bugs_of(lambda: keep(asyncio.sleep(0), name="short")) == []
    assert await _bugs_of(lambda: keep(asyncio.sleep(9), name="long").cancel()) == []


async def test_a_bug_in_a_callback_of_our_code_is_told_and_one_of_a_library_is_not() -> None:
    loop = asyncio.get_running_loop()
    (ours,) = await _bugs_of(lambda: loop.call_soon(ManualClock().advance, -1))
    assert "AssertionError: monotonic time does not go back" in ours
    assert await _bugs_of(lambda: loop.call_soon(re.compile, "(")) == []


def test_a_bug_in_a_thread_is_told_by_the_threads_name() -> None:
    bugs: list[str] = []
    watch_threads(bugs.append)
    thread = threading.Thread(target=ManualClock().advance, args=(-1,), name="lease")
    thread.start()
    thread.join()
    assert bugs == ["the lease thread was ended by a bug: AssertionError: monotonic time does not go back"]


def test_every_task_of_a_long_running_process_is_kept_or_looked_after() -> None:
    starts = re.compile(r"create_task\(|ensure_future\(")
    found = {
        path.name
        for part in LONG_RUNNING
        for path in (ROOT / part).rglob("*.py")
        if starts.search(path.read_text(encoding="utf-8"))
    }
    assert found == TASKS_OTHERS_LOOK_AFTER
