"""New interpreters for tests without the seconds that loading torch takes: forks of one process that has loaded it.

Most of a test cluster's start is `import torch` in each of its processes. After `begin`, `subprocess.Popen` of one of
our long-lived programs gives a fork of a helper instead, which has others' packages imported and nothing begun: no
thread, no gRPC, no transport. The fork is a true child of whoever asked for it (pid, status, death of the parent), has
its own environment and command line, and starts its own children in the same way. `KVRELAY_COLD_TESTS=1`, as `make
test-full` sets it, starts everything as users do.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import psutil

COLD_VARIABLE = "KVRELAY_COLD_TESTS"
# Programs that stay, all of whose start is worth saving. Tests of what a short command costs start a real one.
PROGRAMS = frozenset(
    {
        "kvrelay.cli.main",
        "kvrelay.cli.child",
        "kvrelay.prefill_node.rank_child",
        "faults.lab.node_main",
        "faults.lab.up_main",
    }
)
# Others' packages only: the lab changes ours before they are imported.
IMPORTED = (
    "torch", "torch.distributed", "numpy", "safetensors.torch", "tokenizers", "jinja2",
    "grpc.aio", "grpc_health.v1._async", "grpc_reflection.v1alpha._async", "google.protobuf.text_format",
    "pydantic_settings", "redis.asyncio.cluster", "opentelemetry.sdk.metrics",
    "prometheus_client", "uvloop", "xxhash", "psutil",
)  # fmt: skip
_ROOM = 24 << 10  # bytes that a helper's own command line and environment keep free, each, for those of its forks
_MESSAGE_BYTES = 1 << 20
_HELPER_NAME = "warm-helper"
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_plain_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = inspect.signature(_plain_execute)
_PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
# What a fork does not do; who asks for it gets a new interpreter.
_USUAL = {
    "executable": None, "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False,
    "gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1,
}  # fmt: skip


def begin() -> None:
    """Start processes warm from here on, unless the environment says otherwise; a second call changes nothing."""
    if not os.environ.get(COLD_VARIABLE) and subprocess.Popen._execute_child is _plain_execute:  # type: ignore[attr-defined]
        _take_over(cache(_Helper.of_a_new_interpreter))


def command_line(process: psutil.Process) -> list[str]:
    """Return what a process was started with; what a fork has not filled of its helper's room reads as empty words."""
    return [word for word in process.cmdline() if word]


def children(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes that one has started, without its helper."""
    return [child for child in process.children() if command_line(child) != [_HELPER_NAME]]


def _take_over(helper: Callable[[], _Helper]) -> None:
    def execute(self: Any, args: Any, *rest: Any) -> None:
        asked = _PARAMETERS.bind(self, args, *rest).arguments
        environ = dict(os.environ if asked["env"] is None else asked["env"])
        if (
            environ.get(COLD_VARIABLE)
            or not _is_warm(args)
            or any(asked[name] != usual for name, usual in _USUAL.items())
        ):
            _plain_execute(self, args, *rest)
            return
        given = (asked[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        streams = [own if stream == -1 else stream for own, stream in enumerate(given)]
        folder, new_session = asked["cwd"] or os.getcwd(), bool(asked["start_new_session"])
        self.pid = helper().spawn(list(map(str, args)), environ, folder, streams, new_session=new_session)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPE_ENDS))

    vars(subprocess)["Popen"]._execute_child = execute


def _is_warm(args: Any) -> bool:
    if isinstance(args, str) or args[0] != sys.executable:
        return False
    return args[2] in PROGRAMS if args[1] == "-m" else Path(args[1]).parent == Path(__file__).parent


class _Helper:
    """The asker's end of a process that forks for it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # threads of a test may start processes at once

    @classmethod
    def of_a_new_interpreter(cls) -> _Helper:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "KVRELAY_TEST_ROOM": "." * _ROOM}
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "." * _ROOM],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environ, start_new_session=True,
            )  # fmt: skip
        return cls(ours)

    @classmethod
    def of_this_process(cls) -> _Helper:
        """Fork a helper off; it stays as this process is now. Returns twice, in the helper's forks never."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            os.close(nothing)
            _rename([_HELPER_NAME], {})
            _run(_serve(theirs))
        theirs.close()
        return cls(ours)

    def spawn(
        self, words: list[str], environ: dict[str, str], folder: str, streams: Sequence[int], *, new_session: bool
    ) -> int:
        """Start a process whose streams 0 to 2 are these, and return its pid.

        Raises:
            OSError: the helper has ended.
        """
        asked = {
            "words": words,
            "environ": environ,
            "folder": folder,
            "new_session": new_session,
            "parent": os.getpid(),
        }
        with self._lock:
            _prctl(_SET_CHILD_SUBREAPER, 1)  # only now: who loses a parent at other times goes to init, as it should
            try:
                socket.send_fds(self._connection, [json.dumps(asked).encode()], list(streams))
                pid = self._connection.recv(64)
            finally:
                _prctl(_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise ChildProcessError("the process that forks for tests has ended")
        return int(pid)


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for whoever asks until nobody is left to ask; return in each fork, with what it was asked to be."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        asked: dict[str, Any] = json.loads(message)
        pid = _fork_for_another(asked["parent"])
        if pid == 0:
            connection.close()
            return {**asked, "streams": streams}
        for stream in streams:
            os.close(stream)
        connection.send(str(pid).encode())


def _fork_for_another(parent: int) -> int:
    """Fork a child that becomes `parent`'s: its own parent ends at once, and `parent` takes orphans.

    Returns 0 in the child, which ends where `parent` has ended meanwhile.
    """
    reads, writes = os.pipe()
    between = os.fork()
    if between == 0:
        first_parent = os.getpid()
        pid = os.fork()
        if pid:
            os.write(writes, str(pid).encode())
            os._exit(0)
        os.close(reads)
        os.close(writes)
        while os.getppid() == first_parent:
            time.sleep(0.001)
        if os.getppid() != parent:
            os._exit(1)
        return 0
    os.waitpid(between, 0)
    pid = int(os.read(reads, 64))
    os.close(reads)
    os.close(writes)
    return pid


def _run(asked: dict[str, Any]) -> NoReturn:
    """Become what was asked for."""
    if asked["new_session"]:
        os.setsid()
    for own, given in enumerate(asked["streams"]):
        os.dup2(given, own)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    _rename(asked["words"], asked["environ"])
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    if _starts_others(asked["words"]):
        helper = _Helper.of_this_process()
        _take_over(lambda: helper)
    if asked["words"][1] == "-m":
        sys.argv = asked["words"][2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = asked["words"][1:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(0)


def _starts_others(words: Sequence[str]) -> bool:
    ring_size = words[words.index("--ring-size") + 1] if "--ring-size" in words else "1"
    return words[2:3] == ["faults.lab.up_main"] or "up" in words[3:4] or ("prefill" in words and ring_size != "1")


def _rename(words: Sequence[str], environ: dict[str, str]) -> None:
    """Write a command line and an environment where the kernel shows them; nothing of this process points there."""
    bounds = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    shown = (words, [f"{key}={value}" for key, value in environ.items()])
    for lines, start, end in zip(shown, bounds[::2], bounds[1::2], strict=True):
        text = b"".join(line.encode() + b"\0" for line in lines)[: end - start]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # what is shared stays shared
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
