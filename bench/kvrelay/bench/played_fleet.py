"""A router process and an index with registered nodes that do not exist: enough to place, not to serve."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.core import prefix_hash
from kvrelay.core.errors import UnavailableError
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.server import EmbeddedServer
from kvrelay.index.writer import PrefixWriter
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.proto import convert
from kvrelay.proto.v1 import fleet_pb2

FLEET = "bench"
BLOCK_TOKENS = 512
_LEASE_S = 3600.0
_LAYOUT = b"bench"
_HOLDERS = 2  # prefill nodes that hold the first half of each prompt


@dataclass(frozen=True, slots=True)
class PlayedFleet:
    index: EmbeddedServer
    router: str  # endpoint


@asynccontextmanager
async def playing(
    prompts: Sequence[npt.NDArray[np.int32]],
    *,
    prefill_nodes: int,
    decode_nodes: int,
    router_options: Sequence[str] = (),
) -> AsyncIterator[PlayedFleet]:
    """Run the router; two of the prefill nodes hold the first half of every prompt."""
    index = EmbeddedServer.start()
    registry = NodeRegistry(index.url, FLEET)
    nodes = [(f"p{at:03}", fleet_pb2.NODE_ROLE_PREFILL) for at in range(prefill_nodes)]
    nodes += [(f"d{at:03}", fleet_pb2.NODE_ROLE_DECODE) for at in range(decode_nodes)]
    writers = []
    for name, role in nodes:
        node = Incarnation.new(name)
        await registry.register(_record(node, role), _LEASE_S)
        kind = Role.PREFILL if role == fleet_pb2.NODE_ROLE_PREFILL else Role.DECODE
        held = _first_halves(prompts) if name in [f"p{at:03}" for at in range(_HOLDERS)] else []
        writer = PrefixWriter(index.url, FLEET, node=node, role=kind, all_hashes=lambda held=held: held)  # type: ignore[misc]
        await writer.start()
        writer.publish(held)
        writers.append(writer)
    router = _start_router(index.url, router_options)
    try:
        yield PlayedFleet(index, await asyncio.to_thread(endpoint_of, router))
    finally:
        router.terminate()
        await asyncio.to_thread(router.wait)
        for writer in writers:
            await writer.stop()
        await registry.close()
        index.stop()


def endpoint_of(process: subprocess.Popen[str]) -> str:
    """Return what a child says it serves at.

    Raises:
        UnavailableError: it ended before it was ready.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UnavailableError(f"{process.args!r} did not become ready")
    return str(json.loads(line)["endpoint"])


def _start_router(index_url: str, options: Sequence[str]) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "kvrelay.cli.main", "router", "--index-url", index_url, "--fleet", FLEET,
        "--model", str(embedded_checkpoint()), "--listen", "127.0.0.1:0", "--max-message-mib", "64",
        "--log-level", "warning", *options,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own


def _first_halves(prompts: Sequence[npt.NDArray[np.int32]]) -> list[bytes]:
    seed = prefix_hash.seed(fingerprint=_LAYOUT)
    return [one for ids in prompts for one in prefix_hash.chain(seed, ids[: len(ids) // 2], block_tokens=BLOCK_TOKENS)]


def _record(node: Incarnation, role: fleet_pb2.NodeRole.ValueType) -> fleet_pb2.NodeRecord:
    return fleet_pb2.NodeRecord(
        node=convert.incarnation_to_pb(node), role=role, endpoint="127.0.0.1:1", ring_size=1,
        layout_fingerprint=_LAYOUT,
        max_model_len=1 << 21, block_tokens=BLOCK_TOKENS, page_tokens=64, total_pages=1 << 20, free_pages=1 << 20,
    )  # fmt: skip
