"""A real prefill node in its own processes, and a decode peer in the test that takes what the node relays."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from grpc import aio

from handoff_lab import ticking
from kvrelay.core.types import Counters, Epoch, Incarnation
from kvrelay.index.registry import NodeRegistry
from kvrelay.kv_transfer import hub_servicer
from kvrelay.kv_transfer.agent_thread import TransferThread
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.hub_values import AdmittedHandoff, HubCallbacks
from kvrelay.kv_transfer.local import Limits, LocalPool
from kvrelay.kv_transfer.nixl import NixlTransport
from kvrelay.kv_transfer.reader_hub import ReaderHub
from kvrelay.kv_transfer.transport import Region, Transport, agent_name
from kvrelay.kv_transfer.values import MAX_RING_SIZE, Request
from kvrelay.kvcache.allocator import PageAllocator, pages_of
from kvrelay.kvcache.checksum import checksum_ranges
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.proto.convert import incarnation_to_pb, pack_ids
from kvrelay.proto.server import connect
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import (
    blocks_pb2_grpc,
    common_pb2,
    decode_pb2_grpc,
    fleet_pb2,
    handoff_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)

BLOCK_TOKENS = 64
HOLDER = Incarnation("router-for-tests", 7)


@dataclass
class NodeProcess:
    process: subprocess.Popen[bytes]
    endpoint: str
    record: fleet_pb2.NodeRecord


def nodes_of(index_url: str) -> list[fleet_pb2.NodeRecord]:
    async def read() -> list[fleet_pb2.NodeRecord]:
        registry = NodeRegistry(index_url, "default")
        try:
            return await registry.nodes()
        finally:
            await registry.close()

    found: list[fleet_pb2.NodeRecord] = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(read())))
    thread.start()
    thread.join()
    return found


@contextmanager
def prefill_node(
    folder: Path,
    *options: str,
    ring_size: int,
    index_url: str,
    name: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    log: IO[str] | None = None,
) -> Iterator[NodeProcess]:
    """Start a node and yield it when it says that it is ready; terminates it afterwards."""
    arguments = ["--model", str(folder), "--ring-size", str(ring_size), "--index-url", index_url, "--name", name]
    arguments += ["--dtype", "float32", "--pool-pages", "64", "--threads", "1", "--log-level", "warning"]
    arguments += ["--lame-duck-s", "0", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrelay.cli.child", str(os.getpid()), "prefill", *arguments],
        stdout=subprocess.PIPE,
        stderr=log,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables),
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        (record,) = [one for one in nodes_of(index_url) if one.node.name == name]
        yield NodeProcess(process, ready["endpoint"], record)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class DecodePeer:
    """Pages, hub and Attach service of a decode node, without the model behind it."""

    hub: ReaderHub
    pool: LatentPool
    allocator: PageAllocator
    admitted: asyncio.Queue[AdmittedHandoff]
    failed: asyncio.Queue[str]

    def reserve(
        self, ref: common_pb2.RequestRef, node: NodeProcess, prompt_tokens: int, *, resident_tokens: int = 0
    ) -> tuple[handoff_pb2.Ticket, list[int]]:
        """Return a ticket and the pages it is for."""
        runs = self.allocator.allocate(self.pool.layout.pages_for(prompt_tokens))
        writer = Incarnation(node.record.node.name, node.record.node.start_id)
        ticket = self.hub.reserve(
            Request(ref.request_id, ref.attempt),
            writer=writer,
            ring_size=node.record.ring_size,
            runs=runs,
            resident_tokens=resident_tokens,
            prompt_tokens=prompt_tokens,
            timeout_s=60.0,
            lease_s=60.0,
        )
        return ticket, pages_of(runs)

    async def all_pages_free(self, *, within_s: float = 15.0) -> None:
        """Wait until the hub has given every page back."""
        deadline = asyncio.get_running_loop().time() + within_s
        while self.allocator.free_pages < self.allocator.num_pages:
            assert asyncio.get_running_loop().time() < deadline, self.hub.stats()
            await asyncio.sleep(0.05)

    def rows(self, pages: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return what has landed, [layers, tokens, W]."""
        layers = range(self.pool.layout.num_layers)
        return torch.stack([self.pool.layer(layer)[list(pages)].flatten(0, 1)[:num_tokens] for layer in layers])


@asynccontextmanager
async def decode_peer(
    folder: Path, *, name: str = "decode-for-tests", wants_token: bool = True
) -> AsyncIterator[DecodePeer]:
    """`wants_token`: a hand-off brings a first token; a push of cached blocks does not."""
    model = load_model(folder, dtype="float32", device=torch.device("cpu"))
    pool = LatentPool(model.layout(block_tokens=BLOCK_TOKENS), 128, torch.device("cpu"))
    node, fences = Incarnation.new(name), FenceMemory.on_host(16 * MAX_RING_SIZE)
    region = Region(pool.address, pool.num_bytes)

    def make(counters: Counters) -> Transport:
        return NixlTransport(
            agent_name=agent_name(node, 0), pool=region, pool_pages=pool.num_pages, fences=fences, counters=counters
        )

    thread = TransferThread(make, on_fatal=lambda: None)
    thread.start()
    memory = pool.memory()
    local = LocalPool(pool.layout, pool.num_pages, lambda ranges: checksum_ranges(memory, ranges))
    allocator = PageAllocator(pool.num_pages)
    admitted: asyncio.Queue[AdmittedHandoff] = asyncio.Queue()
    failed: asyncio.Queue[str] = asyncio.Queue()

    def free(_: Epoch, pages: tuple[int, ...]) -> None:
        allocator.release(pages)

    callbacks = HubCallbacks(
        on_admitted=admitted.put_nowait,
        on_failed=lambda _epoch, _request, reason: failed.put_nowait(reason),
        on_pages_free=free,
        wants_token=wants_token,
    )
    hub = ReaderHub(
        node=node, endpoint="", pool=local, cells=fences.cells, thread=thread, callbacks=callbacks, limits=Limits()
    )
    server = aio.server()
    hub_servicer.add_to_server(hub, server)
    hub.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    timer = asyncio.create_task(ticking(hub))
    try:
        yield DecodePeer(hub, pool, allocator, admitted, failed)
    finally:
        timer.cancel()
        await server.stop(None)
        await asyncio.to_thread(thread.stop)


class _SilentService(decode_pb2_grpc.DecodeNodeServicer):
    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[handoff_pb2.ReaderEvent]:
        async for _ in request_iterator:
            pass
        yield handoff_pb2.ReaderEvent()


@asynccontextmanager
async def silent_decode_node() -> AsyncIterator[str]:
    """Serve an Attach that listens and never answers; yields its endpoint."""
    server = aio.server()
    decode_pb2_grpc.add_DecodeNodeServicer_to_server(_SilentService(), server)  # type: ignore[abstract]
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield endpoint
    finally:
        await server.stop(None)


class Client:
    """Speaks to a prefill node as a router would."""

    def __init__(self, node: NodeProcess, *, tls: Tls | None = None) -> None:
        self.node = node
        self._channel = connect(node.endpoint, max_message_bytes=32 << 20, tls=tls)
        self.stub: prefill_pb2_grpc.PrefillNodeAsyncStub = prefill_pb2_grpc.PrefillNodeStub(self._channel)
        self.blocks = blocks_pb2_grpc.BlockSourceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    def request(
        self,
        ref: common_pb2.RequestRef,
        prompt: Sequence[int],
        *,
        ticket: handoff_pb2.Ticket | None = None,
        **changes: Any,
    ) -> prefill_pb2.PrefillRequest:
        fields: dict[str, Any] = {
            "request": ref,
            "holder": incarnation_to_pb(HOLDER),
            "node": self.node.record.node,
            "packed_ids": pack_ids(prompt),
            "sampling": common_pb2.Sampling(max_tokens=1 if ticket is None else 8),
            "prefix_seed": b"tenant-of-tests!",
        }
        request = prefill_pb2.PrefillRequest(**(fields | changes))
        if ticket is not None:
            request.ticket.CopyFrom(ticket)
        return request

    def prefill(
        self, ref: common_pb2.RequestRef, prompt: Sequence[int], **changes: Any
    ) -> aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]:
        """`changes` are those of `request`."""
        return self.stub.Prefill(self.request(ref, prompt, **changes))

    async def stats(self) -> common_pb2.NodeStats:
        stats: common_pb2.NodeStats = await self.stub.Stats(common_pb2.StatsRequest())
        return stats

    async def settled(self, *, within_s: float = 15.0) -> common_pb2.NodeStats:
        """Return the stats once nothing is held by requests any more."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            stats = await self.stats()
            total = stats.free_pages + stats.cached_pages + stats.pinned_pages + stats.quarantined_pages
            assert stats.total_pages == total
            if not stats.pinned_pages and not stats.active_requests and not stats.sessions:
                return stats
            assert asyncio.get_running_loop().time() < deadline, stats
            await asyncio.sleep(0.05)
