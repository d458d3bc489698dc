"""A process's time as a prefill node, or as rank 0 of one: start, drain and end."""

from __future__ import annotations

import asyncio
from functools import partial

from kvrelay.core import pace
from kvrelay.core.drain import DrainRequests, drained_for
from kvrelay.core.lifecycle import Ending, announce_ready, die
from kvrelay.core.supervise import watch_loop
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node.led_ring import RingStart
from kvrelay.prefill_node.serving import PrefillServer
from kvrelay.prefill_node.settings import PrefillSettings


async def serve(settings: PrefillSettings, loaded: Loaded, ring: RingStart, asked: DrainRequests) -> Ending:
    """Serve until a stop signal or a drain, finish what runs, and return how it ended. The agent goes on.

    Raises:
        ServeError: it cannot start.
    """
    watch_loop(asyncio.get_running_loop(), die)
    ring.agent.on_fatal = partial(die, "the transfer thread died")
    with pace.serving():
        server = PrefillServer(settings, loaded, ring, asked)
        await server.start()
        pace.settle()
        announce_ready(endpoint=server.endpoint, name=ring.node.name)
        ending = await drained_for(server, asked)
        await server.stop()
        return ending
