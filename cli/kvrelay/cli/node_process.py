"""`kvrelay prefill` and `kvrelay decode`: how a node's process starts and ends.

A node of one rank can change its role and keep its process.

What outlives a role: weights, the registered pool with its agent, the node's name and incarnation. What does not:
requests, page tables, the prefix cache, the registry's record. A larger ring is a prefill node for good.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import uvloop

from kvrelay.core import otel
from kvrelay.core.drain import DrainRequests
from kvrelay.core.lifecycle import Ending, StopSignals, die, end_process, new_incarnation, set_up_logging
from kvrelay.core.settings import in_other_role, load
from kvrelay.core.supervise import watch_threads
from kvrelay.core.types import Incarnation, Role
from kvrelay.decode_node import app as decode_app
from kvrelay.decode_node.data_plane import start_decode_agent
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kv_transfer.pool_agent import GPU_STAGING_BYTES
from kvrelay.model.loaded import Loaded
from kvrelay.prefill_node import app as prefill_app
from kvrelay.prefill_node import ring_process
from kvrelay.prefill_node.led_ring import RingStart
from kvrelay.prefill_node.settings import PrefillSettings, rank_place

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
log = logging.getLogger(__name__)


def prefill(argv: list[str]) -> NoReturn:
    """Run a prefill node, or one rank of it, until it is told to stop; ends the process.

    Raises:
        ServeError: it cannot start; the message says why.
    """
    settings = load(PrefillSettings, argv, prog="kvrelay prefill")
    if rank_place(settings).ring_size > 1:
        ring_process.main(argv)
    _run(Role.PREFILL, settings, in_other_role(DecodeSettings, settings))


def decode(argv: list[str]) -> NoReturn:
    """Run a decode node until it is told to stop; ends the process.

    Raises:
        ServeError: it cannot start; the message says why.
    """
    settings = load(DecodeSettings, argv, prog="kvrelay decode")
    _run(Role.DECODE, in_other_role(PrefillSettings, settings, ring_size=1), settings)


def _run(first: Role, prefill_settings: PrefillSettings, decode_settings: DecodeSettings) -> NoReturn:
    settings = prefill_settings if first is Role.PREFILL else decode_settings
    set_up_logging(settings.log_level, settings.log_format)
    watch_threads(die)
    node = new_incarnation(settings.name, first)
    otel.export(settings.trace_exporter, service=node.name)
    loaded = Loaded.load(settings, gpu_staging_bytes=GPU_STAGING_BYTES)  # in either role: it may change
    ending = uvloop.run(_serve(first, prefill_settings, decode_settings, loaded, node))
    # A peer may still be writing into the pool; unmapping it on the way out would crash in the transport's threads.
    end_process(1 if ending is Ending.CRASHED else 0)


async def _serve(
    role: Role, prefill_settings: PrefillSettings, decode_settings: DecodeSettings, loaded: Loaded, node: Incarnation
) -> Ending:
    asked = DrainRequests(StopSignals(asyncio.get_running_loop()), why_no_switch="")
    agent = start_decode_agent(loaded.pool, decode_settings, node, on_fatal=lambda: die("the transfer thread died"))
    while True:
        if role is Role.DECODE:
            ending = await decode_app.serve(decode_settings, loaded, node, agent, asked)
        else:
            ring = RingStart(None, node, [loaded.pool.num_pages], agent)
            ending = await prefill_app.serve(prefill_settings, loaded, ring, asked)
        if ending is not Ending.SWITCHES:
            return ending
        asked.role_decided()
        role = _OTHER[role]
        log.info("%s goes on as a %s node", node.name, role.value)
