"""A process's time as a decode node: start, drain and end.

Threads: asyncio (gRPC, registry, index), step, transfer and lease.
"""

from __future__ import annotations

import asyncio
from functools import partial

from kvrelay.core import pace
from kvrelay.core.drain import DrainRequests, drained_for
from kvrelay.core.lifecycle import Ending, announce_ready, die
from kvrelay.core.supervise import keep, watch_loop
from kvrelay.core.types import Incarnation
from kvrelay.decode_node.serving import DecodeServer
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.pool_agent import PoolAgent
from kvrelay.model.loaded import Loaded

_CRASH_FLUSH_S = 0.5  # for the errors of running requests to leave


async def serve(
    settings: DecodeSettings, loaded: Loaded, node: Incarnation, agent: PoolAgent, asked: DrainRequests
) -> Ending:
    """Serve until a stop signal, a drain or a crash; return how it ended. The agent goes on."""
    with pace.serving():
        try:
            return await _serve(settings, loaded, node, agent, asked)
        finally:  # of this role nothing stays behind for one that may follow
            watch_loop(asyncio.get_running_loop(), die)
            agent.on_fatal = partial(die, "the transfer thread died")


async def _serve(
    settings: DecodeSettings, loaded: Loaded, node: Incarnation, agent: PoolAgent, asked: DrainRequests
) -> Ending:
    server = DecodeServer(settings, loaded, node, agent, asked)
    watch_loop(asyncio.get_running_loop(), server.node.crash)
    await server.start()
    pace.settle()
    announce_ready(endpoint=server.endpoint, name=node.name)
    crashed = asyncio.create_task(server.node.crashed.wait())
    drained: asyncio.Task[Ending] = keep(drained_for(server, asked), name="drain")
    await asyncio.wait((drained, crashed), return_when=asyncio.FIRST_COMPLETED)
    if crashed.done():
        await asyncio.sleep(_CRASH_FLUSH_S)
        return Ending.CRASHED
    crashed.cancel()
    await server.stop()
    return drained.result()
