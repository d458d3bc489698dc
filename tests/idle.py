"""Whether processes that wait do nothing: how often they wake up, and what share of a core they use.

Wake-ups are counted by the kernel and do not depend on how fast the machine is: their limit holds everywhere. CPU time
does: on a virtual machine in trouble a wake-up to do nothing was seen to take ten times the usual. So another process
wakes up beside the ones that are looked at, and as much dearer as its wake-ups are, as much more may be used. What
disturbs only ever adds, so of several windows one without too much is enough.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

WAKEUPS_PER_S = 100.0  # of a process; a poll each millisecond is 900, heartbeats and timers of a node about 30
_USUAL_WAKEUP_S = 150e-6  # of CPU time, of an event loop on a healthy machine
_NUM_WINDOWS = 3
# Each of its threads looks up from epoll every 10 ms, and that is not ours to change.
_NOT_OURS = frozenset({"gloo_tcp_loop"})
_WAKES = """
import asyncio, sys, time
async def main():
    wakeups = 0
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    def answer():
        if sys.stdin.readline():
            print(time.process_time(), wakeups, flush=True)
        else:
            ended.set()
    loop.add_reader(sys.stdin, answer)
    while not ended.is_set():
        await asyncio.sleep(0.05)
        wakeups += 1
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Processes that wait, and the share of a core that all of them together may use on a healthy machine."""

    pids: Sequence[int]
    share: float


def assert_idle(parties: Mapping[str, Waiting], *, window_s: float = 3.0) -> None:
    """Hold processes to few wake-ups, each, and to little CPU time; takes up to three windows, mostly one."""
    pids = sorted({pid for party in parties.values() for pid in party.pids})
    with _Control() as control:
        for _ in range(_NUM_WINDOWS):
            wrong = _window(parties, pids, control, window_s)
            if not wrong:
                return
    raise AssertionError("\n".join(wrong))


async def assert_self_idle(pid: int, share: float, *, window_s: float = 3.0) -> None:
    """Like `assert_idle` for the process of the event loop that runs this, and that has nothing else to do."""
    await asyncio.to_thread(assert_idle, {"this process": Waiting([pid], share)}, window_s=window_s)


def _window(parties: Mapping[str, Waiting], pids: Sequence[int], control: _Control, window_s: float) -> list[str]:
    """Return what was too much in one window."""
    usual_s, began_s = control.read(), time.monotonic()
    wakeups, used_s = {pid: _wakeups(pid) for pid in pids}, {pid: _cpu_s(pid) for pid in pids}
    time.sleep(window_s)
    took_s = time.monotonic() - began_s
    rates = {pid: (_wakeups(pid) - wakeups[pid]) / took_s for pid in pids}
    shares = {pid: (_cpu_s(pid) - used_s[pid]) / took_s for pid in pids}
    dear = max(1.0, control.wakeup_s(since=usual_s) / _USUAL_WAKEUP_S)

    wrong = [f"process {pid} woke up {rate:.0f} times a second" for pid, rate in rates.items() if rate > WAKEUPS_PER_S]
    for name, party in parties.items():
        used = sum(shares[pid] for pid in party.pids)
        if used >= party.share * dear:
            each = {pid: round(shares[pid], 4) for pid in party.pids}
            wrong.append(f"{name} used {used:.3f} of a core; a wake-up took {dear:.1f} times the usual; {each}")
    return wrong


class _Control:
    """A process that wakes up twenty times a second and does nothing else."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()  # it has started
        return self

    def read(self) -> tuple[float, int]:
        """Return (CPU seconds, wake-ups) so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        used_s, wakeups = self._process.stdout.readline().split()
        return float(used_s), int(wakeups)

    def wakeup_s(self, *, since: tuple[float, int]) -> float:
        """Return the CPU time of a wake-up since an earlier reading."""
        used_s, wakeups = self.read()
        return (used_s - since[0]) / max(1, wakeups - since[1])

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate()  # the end of its input ends it


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _wakeups(pid: int) -> int:
    """Return how often threads of a process have gone to sleep so far, as often as they woke up."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has just ended
        if status["Name"].strip() not in _NOT_OURS:
            found += int(status["voluntary_ctxt_switches"])
    return found
