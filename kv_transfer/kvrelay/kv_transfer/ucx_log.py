"""What UCX writes into its log: over which transports it writes to memory of others, and warnings, which become ours.

UCX tells nobody else which of its transports a link uses. With UCX_PROTO_INFO=*ucp_put* it logs one table whenever it
chooses how to write over a new kind of link. The log is a file in memory that only this process sees: its own output is
for its ready line and its own log.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from dataclasses import dataclass, field
from functools import cache

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20  # of the file, before what was read is thrown away
_PREFIX = re.compile(r"^\[[\d.]+\] \[[^\]]*\]\s*")
_HEADER = re.compile(r"\| (?P<worker>\S*) .*?(?P<reach>self|intra-node|inter-node) cfg#\d+")
_ROW = re.compile(r"\| \S*\.\.inf +\|[^|]*\| (?P<config>[^|]*?) *\|")
_MESSAGE = re.compile(r"UCX +(?P<level>FATAL|ERROR|WARN|DIAG|INFO|DEBUG|TRACE) +(?P<text>.*)")
_TRANSPORT = re.compile(r"[a-z][a-z0-9_]*/[^\s/]+")
_LEVELS = {"FATAL": logging.ERROR, "ERROR": logging.ERROR, "WARN": logging.WARNING}


@dataclass(frozen=True, slots=True)
class Choice:
    """How UCX writes large pieces over one kind of link."""

    worker: str  # the first characters of the agent's name
    reach: str  # self, intra-node or inter-node
    route: str  # transports and devices, as tcp/eth0 or rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1


@dataclass(slots=True)
class Tables:
    """Reads choices out of log lines. Other lines are given to our own log."""

    choices: list[Choice] = field(default_factory=list)
    _worker: str = ""
    _reach: str = ""

    def take(self, line: str) -> None:
        header, row = _HEADER.search(line), _ROW.search(line)
        if header is not None:
            self._worker, self._reach = header["worker"], header["reach"]
        elif row is not None and self._reach:
            found = " ".join(dict.fromkeys(_TRANSPORT.findall(row["config"])))
            self.choices.append(Choice(self._worker, self._reach, found))
        elif (message := _MESSAGE.search(line)) is not None:
            log.log(_LEVELS.get(message["level"], logging.DEBUG), "UCX: %s", message["text"])


class UcxLog:
    """The log of this process. Created by `ucx_log`; read on the thread that owns a transport."""

    def __init__(self) -> None:
        self._file = os.memfd_create("ucx-log")
        self._read_bytes = 0
        self._rest = b""  # of a line whose end is not there yet
        self._tables = Tables()
        self._libc = ctypes.CDLL(None)
        os.environ["UCX_LOG_FILE"] = f"/proc/self/fd/{self._file}"
        os.environ["UCX_PROTO_INFO"] = "*ucp_put*"

    def choices(self) -> list[Choice]:
        """Return all choices so far, in order; what was chosen lately is there."""
        self._libc.fflush(None)  # UCX buffers what it writes into files
        while new := os.pread(self._file, _MOST_BYTES, self._read_bytes):
            self._read_bytes += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                self._tables.take(_PREFIX.sub("", line.decode(errors="replace")))
        if os.fstat(self._file).st_blocks * 512 > _MOST_BYTES:
            os.ftruncate(self._file, 0)  # UCX goes on where it was, behind a hole that takes no memory
        return self._tables.choices


@cache
def ucx_log() -> UcxLog:
    """Return the log of this process; the first call must come before UCX is loaded."""
    return UcxLog()


def is_expected(route: str, expected: tuple[str, ...]) -> bool:
    """Return whether all transports of a route begin with one of `expected`; without any, whether none is TCP."""
    transports = [one for one in route.split() if one != "or"]
    if not expected:
        return not any(one.startswith("tcp/") for one in transports)
    return all(one.startswith(expected) for one in transports)
