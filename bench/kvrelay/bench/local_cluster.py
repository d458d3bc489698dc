"""A cluster of real processes on this machine, for as long as a `with` block lasts: `kvrelay up` and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvrelay.core.errors import UnavailableError

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster that answers requests. Created by `running`."""

    endpoint: str
    process: subprocess.Popen[str]
    log: Path  # what `up` said

    def processes(self) -> list[psutil.Process]:
        """Return every process of the cluster, the supervisor first."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def said(self) -> str:
        return self.log.read_text()


@contextmanager
def running(
    options: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    show: bool = False,
    ready_timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[LocalCluster]:
    """Run `kvrelay up` with these options on a free port.

    Args:
        environ: variables on top of this process's own.
        ready_timeout_s: within which it must be ready.
        show: let `up` speak on our stderr; `said` is then empty.

    Raises:
        UnavailableError: it did not become ready; the text is what it said.
    """
    with tempfile.TemporaryDirectory(prefix="kvrelay-up-") as folder:
        log = Path(folder) / "up.log"
        process = start([*options, "--listen", "127.0.0.1:0"], log=log, environ=environ, show=show)
        try:
            yield LocalCluster(_endpoint(process, log, ready_timeout_s), process, log)
        finally:
            stop(process)


def start(
    options: Sequence[str], *, log: Path, environ: Mapping[str, str] | None = None, show: bool = False
) -> subprocess.Popen[str]:
    """Start `kvrelay up`; its stdout is a pipe, its stderr goes to `log`, or to ours when it is to be shown."""
    with log.open("w") as file:
        return subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "kvrelay.cli.main", "up", *options],
            stdout=subprocess.PIPE, stderr=None if show else file, text=True,
            env={**os.environ, **(environ or {})}, start_new_session=True,
        )  # fmt: skip


def stop(process: subprocess.Popen[str]) -> int:
    """Ask `up` to drain and return its exit status; kill it when it takes longer than it may."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children die with it
        return process.wait()


def _endpoint(process: subprocess.Popen[str], log: Path, timeout_s: float = READY_TIMEOUT_S) -> str:
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()  # ends at the latest when the timer has killed the process
    finally:
        timer.cancel()
    word, _, endpoint = line.strip().partition(" ")
    if word != "ready":
        process.kill()
        process.wait()
        raise UnavailableError(f"the cluster did not become ready:\n{log.read_text()}")
    return endpoint
