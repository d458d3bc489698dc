"""The lab's cluster: real processes with fault points, and what a test does to them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc
import psutil

from cluster.cluster import Cluster, GenerateCall, Spec, status_of, wait_until
from faults.lab.control import FOLDER_VARIABLE, Remote
from kvrelay.bench import local_cluster
from kvrelay.bench.local_cluster import LocalCluster
from kvrelay.proto.v1 import fleet_pb2
from repo import child_path
from warm_start import command_line

LEASE_S = 2.0
FENCE_TIMEOUT_S = 3.0
STUCK_AFTER_S = 3.0
GROUP_TIMEOUT_S = 4.0

# Short times, so that a test sees what follows from them.
TIMES = {
    **{f"KVRELAY_{role}_LEASE_S": str(LEASE_S) for role in ("ROUTER", "PREFILL", "DECODE")},
    **{f"KVRELAY_{role}_FENCE_TIMEOUT_S": str(FENCE_TIMEOUT_S) for role in ("PREFILL", "DECODE")},
    **{f"KVRELAY_{role}_HEARTBEAT_S": "0.5" for role in ("PREFILL", "DECODE")},
    "KVRELAY_PREFILL_GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S),
    **{f"KVRELAY_{role}_STUCK_AFTER_S": str(STUCK_AFTER_S) for role in ("ROUTER", "PREFILL", "DECODE")},
}


class Fleet(Cluster):
    """A cluster whose processes obey the lab."""

    def __init__(self, local: LocalCluster, lab: Path) -> None:
        super().__init__(local)
        self.remote = Remote(lab)
        self.expected = set(self.stats())  # the nodes that a whole fleet has

    def start(self, prompt: Sequence[int] | str, *, timeout_s: float = 60.0, **sampling: Any) -> GenerateCall:
        """Begin a request; the model's end tokens do not end it, as in the answers it is compared with."""
        return super().start(prompt, timeout_s=timeout_s, **{"ignore_eos": True, **sampling})

    def arm(self, process: str, point: str, kind: str = "on", **rule: Any) -> None:
        self.remote.arm(process, point, kind, **rule)

    def arm_all(self, role: str, point: str, kind: str = "on", **rule: Any) -> None:
        """Arm a point in every process of a role, further ranks included."""
        for path in sorted(self.remote._folder.glob(f"{role}*.sock")):
            name = path.name.removesuffix(".sock")
            if name.partition(".")[0] in self.expected:  # others have joined for one test and left their socket here
                self.arm(name, point, kind, **rule)

    def serve_on(self, *names: str, **rule: Any) -> None:
        """Let the first attempt of each further request go to these nodes; of a role not named, to any."""
        self.arm("router", "place", ",".join(names), **rule)

    def signal(self, name: str, number: signal.Signals, *, rank: int | None = None) -> psutil.Process:
        process = self.process(name, rank=rank)
        process.send_signal(number)
        return process

    def log_of(self, name: str) -> str:
        found = re.search(r"logs in (\S+)", self.local.said())
        assert found is not None
        return (Path(found[1]) / f"{name}.log").read_text()

    def make_whole(self, within_s: float) -> None:
        """Take all faults back and wait until all processes serve and nothing is held. A breakage stays."""
        for one in self.local.processes():
            with suppress(psutil.NoSuchProcess):  # one that had ended, and that its parent now hears of
                if one.status() == psutil.STATUS_STOPPED:
                    one.send_signal(signal.SIGCONT)
        self.remote.clear()
        wait_until(lambda: set(self.stats()) >= self.expected and not self.unsettled(), within_s, self.what_is_wrong)
        self.remote.forgive()

    def what_is_wrong(self) -> str:
        try:
            missing = self.expected - set(self.stats())
            return "\n".join([*self.unsettled(), *(f"{name} is not there" for name in missing)])
        except grpc.RpcError as err:
            return f"a node does not answer: {status_of(err)}"

    def sessions(self, *states: str) -> int:
        """Return how many hand-offs are in one of these states on the decode nodes.

        Unlike `stats` it does not ask prefill nodes, whose step thread may be busy.
        """
        decode = [record for record in self.nodes() if record.role == fleet_pb2.NODE_ROLE_DECODE]
        return sum(self._stats_of(record).sessions.get(state, 0) for record in decode for state in states)

    def retries(self) -> int:
        """Return how many attempts the router has given up so far."""
        return len(re.findall(r"attempt \d+ failed", self.log_of("router")))


@contextmanager
def running(spec: Spec) -> Iterator[Fleet]:
    """Run a cluster of lab processes for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        lab = Path(folder)
        log = lab / "up.log"
        environ = {**os.environ, **TIMES, **spec.variables, FOLDER_VARIABLE: folder, "PYTHONPATH": child_path()}
        environ["TMPDIR"] = folder  # where `up` makes the folder of its logs
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "faults.lab.up_main", *spec.options, "--listen", "127.0.0.1:0"],
                stdout=subprocess.PIPE, stderr=file, text=True, env=environ, start_new_session=True,
            )  # fmt: skip
        try:
            fleet = Fleet(LocalCluster(local_cluster._endpoint(process, log), process, log), lab)
            try:
                yield fleet
            finally:
                fleet.close()
        finally:
            local_cluster.stop(process)


def like(process: psutil.Process, **changed: str) -> subprocess.Popen[bytes]:
    """Start a process of the lab as another one was started, with other values for some options."""
    words, environ = command_line(process), process.environ()
    words[words.index("faults.lab.node_main") + 1] = str(psutil.Process().pid)
    for option, value in changed.items():
        words[words.index(f"--{option}") + 1] = value
    return subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def further_node(fleet: Fleet, model_of: str, name: str, **changed: str) -> Iterator[subprocess.Popen[bytes]]:
    added = like(fleet.process(model_of), name=name, **changed)
    try:
        wait_until(lambda: name in {record.node.name for record in fleet.nodes()}, 60)
        yield added
    finally:
        added.send_signal(signal.SIGTERM)
        assert added.wait(30) == 0
        wait_until(lambda: name not in {record.node.name for record in fleet.nodes()}, 10)


class LabKeeper:
    """Keeps one lab, and replaces it when a deliberate breakage has left damage that does not heal."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._stack = ExitStack()
        self._lab: Fleet | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def lab(self) -> Fleet:
        if self._lab is None:
            self._lab = self._stack.enter_context(running(self._spec))
        return self._lab

    def heal_or_replace(self) -> None:
        assert self._lab is not None
        try:
            self._lab.make_whole(3.0)
        except AssertionError:
            processes = self._lab.local.processes()
            self._lab.local.process.kill()  # it would drain what can never be drained; its children die with it
            psutil.wait_procs(processes, timeout=10)  # and write no more into the folder that goes with the lab
            self._lab = None
            self._stack.close()
