"""A process to write into: a pool on a GPU, its agent, and what the pool held when each notice came."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.direct import DirectTransport
from kvrelay.kv_transfer.direct_pool import DirectPool
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.plan import Copies
from kvrelay.kv_transfer.transport import Address, Region
from kvrelay.kvcache.pool import LatentPool

LAYOUT = PageLayout(num_layers=3, latent_width=512, rope_width=64, dtype="bfloat16", model_id="m")
PAGES = 200
_ANSWER_S = 40.0
HELD_UP_CYCLES = 1_000_000_000


def first_rows(seed: int) -> Tensor:
    """Return what a pool holds at first, in host memory: bytes [all]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (LAYOUT.page_bytes_all_layers * PAGES,), dtype=torch.uint8, generator=generator)


def digest(rows: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(rows.numpy().data)


class Side:
    """A pool with its agent, on the first GPU."""

    def __init__(self, name: str, *, seed: int) -> None:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        self.pool = LatentPool(LAYOUT, PAGES, device)
        self.pool._all.copy_(first_rows(seed))
        torch.cuda.synchronize()
        self.fences = FenceMemory.in_tensor(torch.zeros(8, dtype=torch.int64, device=device))
        self.counters = Counters()
        region = Region(self.pool.address, self.pool.region_bytes, 0)
        other = NixlTransport(
            agent_name=name, pool=region, pool_pages=PAGES, fences=self.fences, counters=self.counters
        )
        self.direct = DirectPool(self.pool)
        self.transport = DirectTransport(other, self.direct, counters=self.counters)

    def rows(self) -> Tensor:
        return self.pool._all.cpu()


def hold_up(side: Side) -> torch.cuda.Event:
    """Make what is written directly from now on wait for over half a second."""
    with torch.cuda.stream(side.direct._writer.stream):
        torch.cuda._sleep(HELD_UP_CYCLES)  # type: ignore[no-untyped-call]
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record()
    return over


class Reader:
    """The test's end of the other process."""

    def __init__(self, name: str, *, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._address: Address | None = None

    def ask(self, command: str, *args: Any) -> Any:
        self._pipe.send((command, args))
        return self._answer()

    @property
    def address(self) -> Address:
        if self._address is None:
            self._address = self._answer()
        return self._address

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), "the reader does not answer"
        return self._pipe.recv()


def _serve(pipe: Connection, name: str, seed: int) -> None:
    side = Side(name, seed=seed)
    seen: dict[bytes, int] = {}
    pipe.send(side.transport.address())
    while True:
        for _, notice in side.transport.notices():
            seen[notice] = digest(side.rows())
        if not pipe.poll(0.0002):
            continue
        try:
            command, args = pipe.recv()
        except EOFError:
            os._exit(0)
        if command == "seen":  # digest of the pool when this notice came in, if it did
            [notice, within_s] = args
            until_s = time.monotonic() + within_s
            while notice not in seen and time.monotonic() < until_s:
                for _, other in side.transport.notices():
                    seen[other] = digest(side.rows())
            pipe.send(seen.get(notice))
        elif command == "write late":  # into the asker's pool, when this device has done nothing for over half a second
            [address, table] = args
            peer = side.transport.connect(address)
            hold_up(side)
            side.transport.post(peer, Copies(table), b"late")
            pipe.send(side.transport.scatters(peer))
        elif command == "now":
            pipe.send(digest(side.rows()))
        elif command == "bytes":
            pipe.send(side.rows()[slice(*args)].tolist())
        elif command == "cell":
            pipe.send(side.fences.cells.load(args[0]))
