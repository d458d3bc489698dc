"""What a process gives back when its time as a decode node is over, and only then."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

from decode_lab import BLOCK_TOKENS, CPU, until
from kvrelay.core.drain import DrainRequests
from kvrelay.core.lifecycle import Ending, StopSignals
from kvrelay.core.types import Incarnation
from kvrelay.decode_node import app
from kvrelay.decode_node.data_plane import start_decode_agent
from kvrelay.decode_node.engine import DecodeEngine
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.loaded import Loaded
from kvrelay.model.transformer import Model

_ALIVE: list[object] = []  # registered memory stays mapped until the process exits


def engines() -> list[DecodeEngine]:
    return [one for one in gc.get_objects() if type(one) is DecodeEngine]


async def test_of_the_time_as_a_decode_node_nothing_stays_behind(model: Model, index_url: str) -> None:
    usual_s, of_other_tests = sys.getswitchinterval(), engines()
    given: dict[str, Any] = {"model": "as loaded", "name": "decode", "index_url": index_url, "lame_duck_s": 0.0}
    settings = DecodeSettings(**given)
    pool = LatentPool(model.layout(block_tokens=BLOCK_TOKENS), 50, CPU)
    _ALIVE.append(pool)
    node, asked = Incarnation.new("decode"), DrainRequests(StopSignals(), why_no_switch="")
    agent = start_decode_agent(pool, settings, node, on_fatal=lambda: None)

    serving = asyncio.create_task(app.serve(settings, Loaded(CPU, model, pool), node, agent, asked))
    await until(lambda: sys.getswitchinterval() < usual_s and gc.get_freeze_count())
    asked.ask(switch_role=True)

    assert await serving is Ending.SWITCHES
    assert sys.getswitchinterval() == usual_s
    assert not gc.get_freeze_count()
    # With an engine goes its memory on a device, once the frames of what has just ended are gone.
    await until(lambda: not [one for one in engines() if one not in of_other_tests])
    await asyncio.to_thread(agent.transfer.stop)
