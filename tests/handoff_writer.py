"""A prefill rank as a process of its own: reads a ticket, writes all of it, prints how it ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from handoff_lab import Memory, Rank, seal, transfer_thread
from kvrelay.core.shard import Span
from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.transport import agent_name
from kvrelay.proto.v1 import handoff_pb2
from repo import child_path
from transport_party import KINDS

PART_TOKENS = 4000


def start(kind: str, ticket: handoff_pb2.Ticket, *, num_pages: int) -> subprocess.Popen[str]:
    """Start a writer; it prints `posting` when its parts are on their way."""
    return subprocess.Popen(
        [sys.executable, __file__, kind, ticket.SerializeToString().hex(), str(num_pages)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **KINDS[kind], "PYTHONPATH": child_path()},
    )


async def main(kind: str, raw_ticket: str, num_pages: str) -> None:
    ticket = handoff_pb2.Ticket.FromString(bytes.fromhex(raw_ticket))
    writer = Incarnation(ticket.writer.name, ticket.writer.start_id)
    memory = Memory(int(num_pages))
    with transfer_thread(kind, agent_name(writer, 0), memory, FenceMemory.on_host(64)) as thread:
        rank = Rank(writer, 0, memory, thread)
        rank.fill(seed=1)
        end = rank.endpoint(ticket)
        running = asyncio.create_task(end.run())
        tokens = end.relayed_tokens
        for start in range(tokens.start, tokens.end, PART_TOKENS):
            for layer in range(3):
                end.add_part(layer, Span(start, min(start + PART_TOKENS, tokens.end)), range(int(num_pages)))
        while not thread.counters.values.get("parts_posted_total") and not running.done():  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.0005)
        if not running.done():
            sys.stdout.write("posting\n")
            sys.stdout.flush()
            seal(end)
        outcome = await running
        sys.stdout.write(f"{outcome}\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
