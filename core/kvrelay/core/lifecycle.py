"""How a process of kvrelay starts, says that it is ready, and ends."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from enum import Enum
from typing import NoReturn

from kvrelay.core import logs
from kvrelay.core.types import Incarnation, Role

_PR_SET_PDEATHSIG = 1
log = logging.getLogger(__name__)


class Ending(Enum):
    """How a node's time in one role ends."""

    LEAVES = "leaves"  # everything here is finished; the process ends with status 0
    CRASHED = "crashed"
    SWITCHES = "switches"  # everything here is finished, and the process goes on in the other role


def set_up_logging(level: str, log_format: logs.LogFormat = "text") -> None:
    """Log to stderr; stdout carries only the ready line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logs.formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def new_incarnation(name: str, role: Role | str) -> Incarnation:
    """Return this process's incarnation; an empty name becomes role-host-<4 hex>, and {host} the host's name."""
    if name:
        return Incarnation.new(name.replace("{host}", socket.gethostname()))
    word = role.value if isinstance(role, Role) else role
    return Incarnation.new(f"{word}-{socket.gethostname()}-{os.urandom(2).hex()}")


def announce_ready(*, endpoint: str, name: str) -> None:
    """Print the one line that supervisors wait for."""
    print(json.dumps({"event": "ready", "endpoint": endpoint, "node": name}), flush=True)  # noqa: T201


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; call it first thing in a child.

    Source: prctl(2), PR_SET_PDEATHSIG. The parent may be gone already, hence the check.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die(reason: str) -> NoReturn:
    """End this process at once with a failure status, from any thread; its supervisor and its peers notice."""
    log.critical("%s; this process exits", reason)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


def end_process(status: int) -> NoReturn:
    """End at once, with everything said, but without running what the interpreter does at its end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


class StopSignals:
    """SIGTERM and SIGINT as an event: the first asks for a drain, the second ends the process at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Take the signals over on this loop; without one only `ask` sets the event."""
        self._asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            if loop is not None:
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._asked.is_set():
            log.warning("second stop signal: exiting at once")
            os._exit(1)
        self._asked.set()

    def ask(self) -> None:
        """Do what the first signal does (for a drain by RPC)."""
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()
