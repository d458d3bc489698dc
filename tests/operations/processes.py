"""A deployment of plain processes on this machine: one role command each, and an index server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.cluster import Client
from kvrelay.cli import client
from kvrelay.index.server import EmbeddedServer
from operations.deployment import ROLES, Dial

READY_S = 90.0
STOP_S = 300.0  # a member may have hundreds of streams to finish


@dataclass(slots=True)
class Member:
    """One role process; a restart keeps name and address."""

    name: str
    role: str
    listen: str
    process: subprocess.Popen[str]


class Processes:
    """Implements Deployment. Created by `processes`."""

    def __init__(
        self,
        index_url: str,
        model: Path,
        folder: Path,
        options: Mapping[str, Sequence[str]],
        dial: Dial,
    ) -> None:
        """
        Args:
            options: more options by role.
            dial: connects to a router or node.
        """
        self._index_url, self._model, self._folder, self._options = index_url, model, folder, options
        self._dial = dial
        self._members: dict[str, Member] = {}
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            routers = ",".join(self._members[name].listen for name in self.members("router"))
            self._client = Client(self._dial(f"ipv4:{routers}", watch_health=True), dial=self._dial)
        return self._client

    def address(self, name: str) -> str:
        return self._members[name].listen

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self._members[name].process.pid)

    def metrics(self, name: str) -> str:
        """Return the address of a member's metrics; it listens there on a port besides its own."""
        ports = {one.laddr.port for one in psutil.Process(self._members[name].process.pid).net_connections("tcp")
                 if one.status == psutil.CONN_LISTEN}  # fmt: skip
        (port,) = ports - {int(self._members[name].listen.rpartition(":")[2])}
        return f"127.0.0.1:{port}"

    def members(self, role: str) -> list[str]:
        return [member.name for member in self._members.values() if member.role == role]

    def scale(self, role: str, count: int) -> None:
        names = self.members(role)
        for name in names[count:]:
            self._stop(self._members.pop(name))
        new = [self._launch(f"{role}-{number}", role, "127.0.0.1:0") for number in range(len(names), count)]
        for member in new:
            self._members[member.name] = member
            self._await_ready(member)
        if role == "router" and count != len(names):
            self._client = None

    def restart(self, name: str) -> None:
        member = self._members[name]
        self._stop(member)
        self.revive(name)

    def kill(self, name: str) -> None:
        self._members[name].process.kill()
        self._members[name].process.wait()

    def revive(self, name: str) -> None:
        old = self._members[name]
        member = self._members[name] = self._launch(name, old.role, old.listen)
        self._await_ready(member)

    @contextmanager
    def isolated(self, one: str, other: str) -> Iterator[None]:
        """A stopped process hears nothing: the nearest that processes of one host have to a cut cable."""
        os.kill(self._members[other].process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._members[other].process.pid, signal.SIGCONT)

    def logs(self) -> str:
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def close(self) -> None:
        for role in ROLES:
            for name in self.members(role):
                self._stop(self._members.pop(name), check=False)

    def _launch(self, name: str, role: str, listen: str) -> Member:
        options = ["--name", name, "--model", str(self._model), "--index-url", self._index_url, "--listen", listen]
        child = ["-m", "kvrelay.cli.child", str(os.getpid())]  # ends with the test
        with (self._folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *child, role, *options, *self._options.get(role, ())],
                stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return Member(name, role, listen, process)

    def _await_ready(self, member: Member) -> None:
        assert member.process.stdout is not None
        timer = threading.Timer(READY_S, member.process.kill)
        timer.start()
        line = member.process.stdout.readline()
        timer.cancel()
        assert line, f"{member.name} did not become ready\n{self.logs()}"
        member.listen = json.loads(line)["endpoint"]

    def _stop(self, member: Member, *, check: bool = True) -> None:
        member.process.send_signal(signal.SIGTERM)
        try:
            status = member.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            status = member.process.wait()
        assert not check or status == 0, f"{member.name} ended with status {status}\n{self.logs()}"


@contextmanager
def processes(
    model: Path,
    folder: Path,
    options: Mapping[str, Sequence[str]],
    *,
    dial: Dial = client.connect,
) -> Iterator[Processes]:
    """Run one router, one prefill node and one decode node for as long as the block lasts."""
    index = EmbeddedServer.start()
    deployment = Processes(index.url, model, folder, options, dial)
    try:
        for role in ROLES:
            deployment.scale(role, 1)
        yield deployment
    finally:
        deployment.close()
        index.stop()
