"""A deployment of containers: the compose file's cpu profile, each container with a network of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cluster.cluster import Client, wait_until
from kvrelay.cli import client
from operations.deployment import Dial
from repo import ROOT

FILE = ROOT / "compose" / "docker-compose.yml"
PATIENT = ROOT / "tests" / "compose" / "patient.yml"
PORTS = {"router": 8400, "prefill": 8401, "decode": 8402}
COMMAND_S = 1800.0  # an image with torch takes that long on a busy machine
READY_S = 180.0


def compose(environ: Mapping[str, str], *words: str, files: tuple[Path, ...] = (FILE,)) -> str:
    """Run docker-compose and return what it prints; fails with what it said."""
    named = [word for file in files for word in ("-f", str(file))]
    return _run("docker-compose", *named, *words, environ=environ)


def engine_runs() -> str:
    """Return why no Docker engine can be used here, or nothing."""
    try:
        done = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False, timeout=30)
    except OSError as err:
        return f"docker: {err}"
    return "" if done.returncode == 0 else f"docker version: {done.stderr.strip()}"


class Containers:
    """Implements Deployment. Created by `containers`. A member is named like its node: role-<container id>."""

    def __init__(self, project: str, environ: Mapping[str, str], files: tuple[Path, ...], dial: Dial) -> None:
        self._project, self._environ, self._files, self._dial = project, environ, files, dial
        self._counts = dict.fromkeys(PORTS, 1)
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self._dial(self.routers(), watch_health=True), dial=self._dial)
        return self._client

    def routers(self) -> str:
        """Return the address of all routers, as gRPC takes it."""
        return "ipv4:" + ",".join(f"{self._address(name)}:{PORTS['router']}" for name in self.members("router"))

    def start(self) -> None:
        self._up()

    def members(self, role: str) -> list[str]:
        ids = self._compose("ps", "-q", role).split()
        return [f"{role}-{container[:12]}" for container in sorted(ids, key=self._number)]

    def scale(self, role: str, count: int) -> None:
        changed, self._counts[role] = self._counts[role] != count, count
        if changed:
            self._up()
        if role == "router":
            self._client = None

    def restart(self, name: str) -> None:
        _run("docker", "restart", "-t", "90", _container(name))
        self._await_healthy(name)

    def kill(self, name: str) -> None:
        _run("docker", "kill", _container(name))

    def revive(self, name: str) -> None:
        _run("docker", "start", _container(name))
        self._await_healthy(name)

    @contextmanager
    def isolated(self, one: str, other: str) -> Iterator[None]:
        """Each of the two drops what it would send to the other; the rest of the network works."""
        cuts = [(one, self._address(other)), (other, self._address(one))]
        for name, address in cuts:
            self._route(name, "add", address)
        try:
            yield
        finally:
            for name, address in cuts:
                self._route(name, "del", address)

    def logs(self) -> str:
        return self._compose("logs", "--no-color", "--tail", "40")

    def close(self) -> None:
        self._compose("down", "--timeout", "30", "--volumes")

    def _up(self) -> None:
        scales = [word for role, count in self._counts.items() for word in ("--scale", f"{role}={count}")]
        self._compose("up", "-d", "--no-build", *scales, "redis", *PORTS)
        for role in PORTS:
            for name in self.members(role):
                self._await_healthy(name)

    def _await_healthy(self, name: str) -> None:
        def healthy() -> bool:
            return self._inspect(name, "{{.State.Health.Status}}") == "healthy"

        wait_until(healthy, READY_S, self.logs)

    def _route(self, name: str, verb: str, address: str) -> None:
        pid = self._inspect(name, "{{.State.Pid}}")
        _run("nsenter", "-t", pid, "-n", "ip", "route", verb, "blackhole", f"{address}/32")

    def _address(self, name: str) -> str:
        found = json.loads(self._inspect(name, "{{json .NetworkSettings.Networks}}"))
        (network,) = found.values()
        return str(network["IPAddress"])

    def _inspect(self, name: str, what: str) -> str:
        return _run("docker", "inspect", "-f", what, _container(name)).strip()

    def _number(self, container: str) -> int:
        label = '{{index .Config.Labels "com.docker.compose.container-number"}}'
        return int(_run("docker", "inspect", "-f", label, container))

    def _compose(self, *words: str) -> str:
        return compose(self._environ, "-p", self._project, "--profile", "cpu", *words, files=self._files)


@contextmanager
def containers(
    environ: Mapping[str, str],
    *,
    files: tuple[Path, ...] = (FILE,),
    dial: Dial = client.connect,
) -> Iterator[Containers]:
    """Run redis, one router, one prefill ring and one decode node for as long as the block lasts."""
    deployment = Containers(f"kvrelay-test-{os.getpid()}", environ, files, dial)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.close()


def _container(name: str) -> str:
    return name.partition("-")[2]


def _run(*command: str, environ: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=COMMAND_S, env={**os.environ, **(environ or {})}
    )
    assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout
