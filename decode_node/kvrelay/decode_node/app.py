"""A decode node's process: asyncio (gRPC, registry, index), step, transfer and lease threads; start and end."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from kvrelay.core import otel
from kvrelay.core.errors import ServeError
from kvrelay.core.lifecycle import StopSignals, announce_ready, die, end_process, new_incarnation, set_up_logging
from kvrelay.core.settings import load
from kvrelay.core.supervise import keep, watch_loop, watch_threads
from kvrelay.core.types import Incarnation, Role
from kvrelay.decode_node.serving import DecodeServer
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.model.loaded import Loaded

log = logging.getLogger(__name__)
_CRASH_FLUSH_S = 0.5  # for the errors of running requests to leave


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
    status = asyncio.run(serve(settings, loaded, node))
    # A peer may still be writing into the pool; unmapping it on the way out would crash in the transport's threads.
    end_process(status)


async def serve(settings: DecodeSettings, loaded: Loaded, node: Incarnation) -> int:
    """Serve until a stop signal, a drain or a crash; return the exit status."""
    server = DecodeServer(settings, loaded, node)
    watch_loop(asyncio.get_running_loop(), server.node.crash)
    await server.start()
    stop = StopSignals(asyncio.get_running_loop())
    announce_ready(endpoint=server.endpoint, name=node.name)
    waits = [asyncio.create_task(one) for one in (stop.wait(), server.drain_asked.wait(), server.node.crashed.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if not server.node.crashed.is_set():
        log.info("draining: %d requests are here", server.node.records.num_active)
        drained = keep(server.drained(), name="drain")
        await asyncio.wait((drained, waits[-1]), return_when=asyncio.FIRST_COMPLETED)
    if server.node.crashed.is_set():
        await asyncio.sleep(_CRASH_FLUSH_S)
        return 1
    await server.stop()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ServeError as err:
        sys.stderr.write(f"kvrelay decode: error: {err}\n")
        sys.exit(1)
