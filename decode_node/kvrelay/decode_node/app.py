"""A decode node's process: asyncio (gRPC, registry, index), step, transfer and lease threads; start and end."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from functools import partial

from kvrelay.core import otel
from kvrelay.core.drain import DrainRequests
from kvrelay.core.errors import ServeError
from kvrelay.core.lifecycle import (
    Ending,
    StopSignals,
    announce_ready,
    die,
    end_process,
    new_incarnation,
    set_up_logging,
)
from kvrelay.core.settings import load
from kvrelay.core.supervise import keep, watch_loop, watch_threads
from kvrelay.core.types import Incarnation, Role
from kvrelay.decode_node.data_plane import start_decode_agent
from kvrelay.decode_node.serving import DecodeServer
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.pool_agent import PoolAgent
from kvrelay.model.loaded import Loaded

log = logging.getLogger(__name__)
_CRASH_FLUSH_S = 0.5  # for the errors of running requests to leave
_SWITCH_S = 0.0005  # a step must not wait 5 ms for the interpreter while the event loop sends tokens
_IDLE_WAIT_S = 2.0  # for the data plane to have let go of what has ended


def main(argv: Sequence[str]) -> int:
    """Run a decode node until it is told to stop; returns the exit status.

    Raises:
        ServeError: it cannot start; the message says why.
    """
    settings = load(DecodeSettings, list(argv), prog="kvrelay decode")
    set_up_logging(settings.log_level, settings.log_format)
    watch_threads(die)
    node = new_incarnation(settings.name, Role.DECODE)
    otel.export(settings.trace_exporter, service=node.name)
    loaded = Loaded.load(settings)
    ending = asyncio.run(_serve_alone(settings, loaded, node))
    # A peer may still be writing into the pool; unmapping it on the way out would crash in the transport's threads.
    end_process(1 if ending is Ending.CRASHED else 0)


async def _serve_alone(settings: DecodeSettings, loaded: Loaded, node: Incarnation) -> Ending:
    agent = start_decode_agent(loaded.pool, settings, node, on_fatal=lambda: die("the transfer thread died"))
    ending = await serve(settings, loaded, node, agent, DrainRequests(StopSignals(asyncio.get_running_loop())))
    await asyncio.to_thread(agent.transfer.stop)
    return ending


async def serve(
    settings: DecodeSettings, loaded: Loaded, node: Incarnation, agent: PoolAgent, asked: DrainRequests
) -> Ending:
    """Serve until a stop signal, a drain or a crash; return how it ended. The agent goes on."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        return await _serve(settings, loaded, node, agent, asked)
    finally:  # of this role nothing stays behind for one that may follow
        sys.setswitchinterval(usual_s)
        watch_loop(asyncio.get_running_loop(), die)
        agent.on_fatal = partial(die, "the transfer thread died")
        gc.collect()  # recorded steps hold device memory, and lie in cycles


async def _serve(
    settings: DecodeSettings, loaded: Loaded, node: Incarnation, agent: PoolAgent, asked: DrainRequests
) -> Ending:
    server = DecodeServer(settings, loaded, node, agent, asked)
    watch_loop(asyncio.get_running_loop(), server.node.crash)
    await server.start()
    announce_ready(endpoint=server.endpoint, name=node.name)
    crashed = asyncio.create_task(server.node.crashed.wait())
    while True:
        await asyncio.wait((asyncio.create_task(asked.wait()), crashed), return_when=asyncio.FIRST_COMPLETED)
        if not crashed.done():
            log.info("draining: %d requests are here", server.node.records.num_active)
            drained = keep(server.drained(), name="drain")
            await asyncio.wait((drained, crashed), return_when=asyncio.FIRST_COMPLETED)
        if crashed.done():
            await asyncio.sleep(_CRASH_FLUSH_S)
            return Ending.CRASHED
        if asked.ending is Ending.LEAVES or not (why_not := await _why_not_elsewhere(server)):
            break
        log.error("%s keeps its role: %s", node.name, why_not)
        asked.role_decided()
        server.serve_again()
    crashed.cancel()
    ending = asked.ending
    await server.stop()
    return ending


async def _why_not_elsewhere(server: DecodeServer) -> str:
    """Return what keeps a drained node's pool from another use, after a wait for what needs a moment only."""
    until_s = asyncio.get_running_loop().time() + _IDLE_WAIT_S
    while (why_not := server.why_not_elsewhere) and asyncio.get_running_loop().time() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return why_not


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ServeError as err:
        sys.stderr.write(f"kvrelay decode: error: {err}\n")
        sys.exit(1)
