"""Forks that stand for new processes belong to whoever asks for them, or to nobody."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]

# Forks for a parent that takes no orphans, so what is forked never becomes its child.
FORKS = """
import os, warm_start
pid = warm_start._fork_for_another(os.getpid())
if pid == 0:
    os.write(2, b"it went on")
    os._exit(0)
print(pid)
"""


def test_a_fork_whose_parent_is_gone_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, cwd=TESTS, timeout=60
    )

    assert done.stderr == ""
    until_s = time.monotonic() + 5
    while runs(int(done.stdout)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not runs(int(done.stdout))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
