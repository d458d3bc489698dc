"""Two hosts on one machine: router, decode and index here, prefill in a network namespace, one cable in between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from cluster.cluster import Client, GenerateCall, wait_until
from faults.lab.control import FOLDER_VARIABLE, Remote
from faults.lab.fleet import TIMES
from kvrelay.index.server import _bundled_program, _free_port
from repo import child_path

_HERE, _THERE = "10.213.77.1", "10.213.77.2"
# Both ends are one host to UCX, so it would copy past the cable.
_ENVIRON = {"UCX_TLS": "tcp", "OMP_NUM_THREADS": "1"}


def refusal() -> str | None:
    """Return why this machine cannot have a network namespace, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    name = f"kvr-try-{os.getpid()}"
    made = _ip("netns", "add", name, check=False)
    if made.returncode == 0:
        cable = _ip("-n", name, "link", "add", "kvrtry", "type", "veth", check=False)
        _ip("netns", "del", name)
        return None if cable.returncode == 0 else f"no veth: {cable.stderr.strip()}"
    return f"no network namespaces: {made.stderr.strip()}"


class TwoHosts(Client):
    """A client of the router. Created by `running`."""

    def __init__(self, endpoint: str, lab: Path, namespace: str, cable: str) -> None:
        super().__init__(grpc.insecure_channel(endpoint))
        self.remote = Remote(lab)
        self._lab, self._namespace, self._cable = lab, namespace, cable

    def start(self, prompt: Sequence[int] | str, *, timeout_s: float = 60.0, **sampling: Any) -> GenerateCall:
        return super().start(prompt, timeout_s=timeout_s, **{"ignore_eos": True, **sampling})

    def cut(self) -> None:
        """Whatever is sent from here on is lost, and neither side is told."""
        _ip("-n", self._namespace, "link", "set", self._cable, "down")

    def heal(self) -> None:
        _ip("-n", self._namespace, "link", "set", self._cable, "up")

    def log_of(self, name: str) -> str:
        return (self._lab / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in sorted(self._lab.glob("*.log")))


@contextmanager
def running(model: Path, *, tcp_retries: int = 15, breakage: str | None = None) -> Iterator[TwoHosts]:
    """Run prefill and the rest on two hosts; prefill's gives a TCP connection up after so many unanswered tries."""
    with ExitStack() as stack:
        lab = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        if breakage is not None:
            Remote(lab).sabotage(breakage)
        tag = f"kvr{os.getpid() % 100_000}"
        namespace, cable = stack.enter_context(_cable(tag))
        _in_namespace(namespace, "net/ipv4/tcp_retries2", tcp_retries)
        index = stack.enter_context(_index())
        node = ("--model", str(model), "--dtype", "float32", "--index-url", index, "--net-devices", cable)
        sizes = ("--pool-pages", "400", "--max-model-len", "2048")
        chunk = ("--chunk-tokens", "128", "--listen", f"{_THERE}:0")
        start = _Starter(stack, lab)
        start("prefill", "prefill-0", *node, *sizes, *chunk, prefix=("ip", "netns", "exec", namespace))
        start("decode", "decode-0", *node, *sizes, "--listen", f"{_HERE}:0")
        endpoint = start("router", "router", "--model", str(model), "--index-url", index)
        client = TwoHosts(endpoint, lab, namespace, cable)
        stack.callback(client.close)
        wait_until(lambda: len(client.nodes()) == 2, 20, client.logs)
        yield client


class _Starter:
    """Starts role processes of the lab, and ends them with the stack."""

    def __init__(self, stack: ExitStack, lab: Path) -> None:
        self._stack, self._lab = stack, lab
        self._environ = {**os.environ, **TIMES, **_ENVIRON, FOLDER_VARIABLE: str(lab), "PYTHONPATH": child_path()}

    def __call__(self, role: str, name: str, *options: str, prefix: Sequence[str] = ()) -> str:
        """Return the process's address once it is ready."""
        log = self._stack.enter_context((self._lab / f"{name}.log").open("w"))
        words = [*prefix, sys.executable, "-m", "faults.lab.node_main", str(os.getpid()), role, "--name", name]
        process = subprocess.Popen([*words, *options], env=self._environ, stdout=subprocess.PIPE, stderr=log, text=True)
        self._stack.callback(_end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"{name} did not start: {Path(log.name).read_text()}"
        return str(json.loads(line)["endpoint"])


@contextmanager
def _cable(tag: str) -> Iterator[tuple[str, str]]:
    """Yield a namespace and the name that both ends of its cable have."""
    here, there = f"{tag}h", f"{tag}p"
    _ip("netns", "add", tag)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", tag)
        _ip("-n", tag, "link", "set", there, "name", here)
        _ip("addr", "add", f"{_HERE}/30", "dev", here)
        _ip("-n", tag, "addr", "add", f"{_THERE}/30", "dev", here)
        _ip("link", "set", here, "up")
        for device in (here, "lo"):
            _ip("-n", tag, "link", "set", device, "up")
        yield tag, here
    finally:
        _ip("netns", "del", tag)  # its end of the cable goes with it, and the other end with that


def _in_namespace(namespace: str, name: str, value: int) -> None:
    """Set a kernel parameter that each network namespace has for itself."""
    _ip("netns", "exec", namespace, "sh", "-c", f"echo {value} > /proc/sys/{name}")


@contextmanager
def _index() -> Iterator[str]:
    port = _free_port()
    options = ["--port", str(port), "--bind", _HERE, "--save", "", "--appendonly", "no", "--protected-mode", "no"]
    process = subprocess.Popen([_bundled_program(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"redis://{_HERE}:{port}/0"
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)
