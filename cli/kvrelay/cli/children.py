"""One child process of `up`: how it starts, says that it is ready, is stopped, and what it said last.

A child leads a process group of its own, to which all belong that it starts: they end with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_TAIL_BYTES = 8192
_POLL_S = 0.01


@dataclass(slots=True)
class Command:
    """What to run. `options` is changed once: after the first start the address is pinned."""

    name: str
    role: str
    options: list[str]
    log: Path
    defaults: Mapping[str, str] = field(default_factory=dict)  # environment; what the user has set goes before


@dataclass(slots=True)
class Child:
    """A running role. Created by `start`."""

    command: Command
    process: asyncio.subprocess.Process
    ready: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _is_over: bool = field(default=False, init=False)  # it has ended, and what it had started was killed

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End the process at once, and all that it has started."""
        if self.alive:
            self.send(signal.SIGKILL)
            _kill_group(self.process.pid)

    async def wait(self) -> int:
        """Return the exit status once the process has ended.

        What it has started ends too, and a future that waits for `ready` is cancelled.
        """
        status = await self.process.wait()
        if not self._is_over:  # once: some time after, the kernel gives the number to others
            self._is_over = True
            _kill_group(self.process.pid)
        if not self.ready.done():
            self.ready.cancel()
        return status


async def all_gone(children: Collection[Child], *, within_s: float) -> None:
    """Wait until killed children and all that they had started have ended, but no longer than this."""
    groups = {child.process.pid for child in children}
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(child.wait() for child in children))
            while groups & _running_groups():  # noqa: ASYNC110 - the kernel is asked, it does not call
                await asyncio.sleep(_POLL_S)


def _kill_group(leader_pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, signal.SIGKILL)


def _running_groups() -> set[int]:
    """Return the process groups of which a process runs; one that has ended may wait long for whoever is to reap it."""
    found = set()
    for process in psutil.process_iter(["status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            with suppress(ProcessLookupError):
                found.add(os.getpgid(process.pid))
    return found


async def start(command: Command) -> tuple[Child, asyncio.Task[None]]:
    """Start a child that dies with this process; stderr goes to its log, stdout is read for the ready line.

    Returns the child and the task that reads its stdout.
    """
    with command.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrelay.cli.child", str(os.getpid()), command.role, *command.options,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
            env={**command.defaults, **os.environ},
            start_new_session=True,  # Ctrl-C in the terminal reaches `up` alone, which then drains
        )  # fmt: skip
    child = Child(command, process)
    return child, asyncio.create_task(_read_stdout(child))


async def _read_stdout(child: Child) -> None:
    assert child.process.stdout is not None
    async for line in child.process.stdout:
        endpoint = _endpoint_of(line)
        if endpoint is not None and not child.ready.done():
            child.ready.set_result(endpoint)


def _endpoint_of(line: bytes) -> str | None:
    """Return the address in a ready line, None for anything else."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("event") != "ready":
        return None
    return str(found["endpoint"])


def last_lines(log: Path, *, num_lines: int) -> list[str]:
    """Return the last lines of a log file."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return list(deque(text.splitlines(), maxlen=num_lines))


@dataclass(slots=True)
class RestartBudget:
    """How often a child may die: quick deaths wait longer each time, and too many end the restarts."""

    max_deaths: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.5
    deaths_s: list[float] = field(default_factory=list)

    def delay_s(self, now_s: float) -> float | None:
        """Count a death at `now_s`; return how long to wait before the restart, None when there is to be none."""
        self.deaths_s = [at_s for at_s in self.deaths_s if now_s - at_s < self.window_s]
        self.deaths_s.append(now_s)
        if len(self.deaths_s) > self.max_deaths:
            return None
        return float(self.first_delay_s * 2 ** (len(self.deaths_s) - 1))
