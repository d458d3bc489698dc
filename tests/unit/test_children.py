"""What a child of `up` has started ends with it, however it ends."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvrelay.cli.children import Child, Command, all_gone

# Starts a process that nobody tells to end, says which, and ends or goes on.
STARTS_ANOTHER = (
    "import subprocess, sys, time\n"
    "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
    "print(other.pid, flush=True)\n"
    "time.sleep(float(sys.argv[1]))"
)


async def a_child(tmp_path: Path, *, lives_s: float) -> tuple[Child, psutil.Process]:
    """Return a child and the process that it has started."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTS_ANOTHER, str(lives_s), stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    other = psutil.Process(int(await process.stdout.readline()))
    return Child(Command("a", "prefill", [], tmp_path / "log"), process), other


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_what_a_child_leaves_behind_is_ended(tmp_path: Path) -> None:
    child, other = await a_child(tmp_path, lives_s=0)

    assert await child.wait() == 0
    await all_gone([child], within_s=5)

    assert not runs(other)


async def test_a_killed_child_takes_along_what_it_has_started(tmp_path: Path) -> None:
    child, other = await a_child(tmp_path, lives_s=60)

    child.kill()
    assert await child.wait() == -9
    await all_gone([child], within_s=5)

    assert not runs(other)
    child.kill()  # legal as often as one likes


async def test_who_cannot_be_killed_is_not_waited_for(tmp_path: Path) -> None:
    child, other = await a_child(tmp_path, lives_s=60)

    began_s = time.monotonic()
    await all_gone([child], within_s=0.1)  # nobody has killed anything

    assert runs(other)
    assert time.monotonic() - began_s < 5
    child.kill()
    await child.wait()


async def test_the_number_of_a_child_that_has_ended_may_be_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, _ = await a_child(tmp_path, lives_s=0)
    await child.wait()
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _number: killed.append(group))

    await child.wait()
    child.kill()

    assert killed == []
