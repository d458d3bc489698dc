"""The index server that comes along."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from kvrelay.index.server import EmbeddedServer


def test_a_stopped_server_is_not_alive_and_stops_twice() -> None:
    server = EmbeddedServer.start()
    assert server.alive

    server.stop()
    server.stop()

    assert not server.alive


def test_the_embedded_server_ends_with_the_process_that_started_it() -> None:
    code = (
        "import os, signal\n"
        "from kvrelay.index.server import EmbeddedServer\n"
        "print(EmbeddedServer.start().pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)

    until_s = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
