"""One process of a transport test, driven by lines of JSON: it owns a pool, fence cells and one real transport."""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import xxhash

from host_direct import HostPool
from kvrelay.core.errors import ServeError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.direct import DirectTransport
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.loopback import LoopbackTransport
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import Address, Handle, Region, Transport
from memory import region_of
from repo import child_path

POOL_BYTES = 128 << 20
BLOBS = ("metadata", "mapping")
# A kind of transport and the environment that selects it.
KINDS: dict[str, dict[str, str]] = {"loopback": {}, "nixl": {}, "nixl-tcp": {"UCX_TLS": "tcp"}}
DIRECT_KINDS: dict[str, dict[str, str]] = {"direct-nixl": {}}  # around one of these


def new_transport(
    kind: str, *, name: str, pool: Region, pool_pages: int, fences: FenceMemory, counters: Counters
) -> Transport:
    make = LoopbackTransport if kind.endswith("loopback") else NixlTransport
    transport = make(agent_name=name, pool=pool, pool_pages=pool_pages, fences=fences, counters=counters)
    return DirectTransport(transport, HostPool(pool), counters=counters) if kind.startswith("direct") else transport


class _Child:
    """What the child process does; each public method is a command."""

    def __init__(self, kind: str, name: str) -> None:
        self._memory = mmap.mmap(-1, POOL_BYTES)
        self._pool = memoryview(self._memory)
        self._fences = FenceMemory.on_host(1024, num_sources=64)
        self._counters = Counters()
        self._transport = new_transport(
            kind, name=name, pool=region_of(self._memory), pool_pages=1, fences=self._fences, counters=self._counters
        )
        self._counted_before: dict[str, float] = {}
        self._handles: list[Handle | None] = []  # None: released
        self._notices: list[tuple[str, str]] = []
        self._posted = 0
        self._landed: dict[str, int] = {}  # notice -> digest of what the notice names, taken when it came in
        self.polls = True

    def step(self) -> None:
        if not self.polls:
            return
        for agent, raw in self._transport.notices():
            text = raw.decode()
            self._notices.append((agent, text))
            if ":" in text:
                self._landed[text] = self.digest(*map(int, text.split(":")))

    def begin_anew(self) -> None:
        """Be as after the start but for links and fence cells; nothing may be on its way any more."""
        for number, handle in enumerate(self._handles):
            if handle is not None:
                self.release(number)
        self._handles.clear()
        self._notices.clear()
        self._landed.clear()
        self._posted = 0
        self._counted_before = dict(self._counters.values)
        self._pool[:] = bytes(POOL_BYTES)

    def posted(self) -> int:
        """Return how many writes were begun that announce themselves."""
        return self._posted

    def address(self) -> dict[str, Any]:
        raw = asdict(self._transport.address())
        return {**raw, **{key: raw[key].hex() for key in BLOBS}}

    def connect(self, **raw: Any) -> str:
        return self._transport.connect(address_from(raw))

    def disconnect(self, peer: str) -> None:
        self._transport.disconnect(peer)

    def fill(self, offset: int, num_bytes: int, seed: int) -> int:
        self._pool[offset : offset + num_bytes] = (xxhash.xxh3_128_digest(bytes([seed])) * (num_bytes // 16 + 1))[
            :num_bytes
        ]
        return self.digest(offset, num_bytes)

    def digest(self, offset: int, num_bytes: int) -> int:
        return xxhash.xxh3_64_intdigest(self._pool[offset : offset + num_bytes])

    def post(self, peer: str, copies: Sequence[Sequence[int]], notice: str) -> int:
        self._handles.append(self._transport.post(peer, [Copy(*copy) for copy in copies], notice.encode()))
        self._posted += 1
        return len(self._handles) - 1

    def fence(self, peer: str, cell: int, value: int) -> int:
        self._handles.append(self._transport.write_fence(peer, cell, value))
        return len(self._handles) - 1

    def progress(self, number: int) -> list[Any]:
        progress = self._transport.poll(self._handle(number))
        return [type(progress).__name__, *asdict(progress).values()]

    def route(self, peer: str) -> str:
        return self._transport.route(peer)

    def release(self, number: int) -> None:
        self._transport.release(self._handle(number))
        self._handles[number] = None

    def notices(self) -> list[tuple[str, str]]:
        return self._notices

    def landed(self, notice: str) -> int | None:
        return self._landed.get(notice)

    def cell(self, number: int) -> int:
        return self._fences.cells.load(number)

    def counted(self) -> dict[str, float]:
        before = self._counted_before
        since = {name: value - before.get(name, 0.0) for name, value in self._counters.values.items()}
        return {name: value for name, value in since.items() if value}

    def set_polls(self, polls: bool) -> None:
        self.polls = polls

    def _handle(self, number: int) -> Handle:
        handle = self._handles[number]
        assert handle is not None
        return handle


class Party:
    """The test's end of one child process."""

    def __init__(self, kind: str, name: str) -> None:
        environment = {**os.environ, **(KINDS | DIRECT_KINDS)[kind], "PYTHONPATH": child_path()}
        self.process = subprocess.Popen(
            [sys.executable, __file__, kind, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.name = name

    def __getattr__(self, command: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps([command, args, kwargs]) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
            if "error" in answer:
                raise PartyError(answer["error"])
            return answer["value"]

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class PartyError(Exception):
    """A ServeError in the child: its type and text."""


def address_from(raw: dict[str, Any]) -> Address:
    regions = {key: Region(**raw[key]) for key in ("pool", "fence")}
    return Address(**{**raw, **regions, **{key: bytes.fromhex(raw[key]) for key in BLOBS}})


def main(kind: str, name: str) -> None:
    child = _Child(kind, name)
    while True:
        child.step()
        if not select.select([sys.stdin], [], [], 0.0005)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # the pool stays registered until the end, whoever is still writing
        command, args, kwargs = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": getattr(child, command)(*args, **kwargs)}
        except ServeError as err:
            answer = {"error": f"{type(err).__name__}: {err}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
