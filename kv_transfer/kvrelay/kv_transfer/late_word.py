"""A rank's fence, said again when the stream that should have carried it broke.

Until decode hears of the fence it keeps the pages from everybody, so a cut between two hosts must not swallow the word.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
from grpc import aio

from kvrelay.core.clock import Clock
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.values import FenceProof
from kvrelay.kv_transfer.wire import proof_to_pb
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2

_CALL_S = 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_GIVE_UP_S = 3600.0  # a decode node that is away for longer has ended, and its pages with it
_TRY_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
log = logging.getLogger(__name__)


async def say_fenced(
    endpoint: str, hello: handoff_pb2.AttachHello, proof: FenceProof, *, limits: Limits, clock: Clock
) -> None:
    """Tell decode until it answers, whatever it answers, or has been away for too long."""
    request, until_s = decode_pb2.FencedRequest(rank=hello, fenced=proof_to_pb(proof)), clock() + _GIVE_UP_S
    pause_s = _PAUSE_S
    while clock() < until_s:
        try:
            # A channel of its own for each try: between them nothing should knock at a host that is away.
            async with connect(endpoint, max_message_bytes=limits.max_message_bytes, tls=limits.tls) as channel:
                await decode_pb2_grpc.DecodeNodeStub(channel).Fenced(request, timeout=_CALL_S)
        except aio.AioRpcError as err:
            if err.code() not in _TRY_AGAIN:
                log.warning("%s does not take the fence of rank %d: %s", endpoint, hello.rank, err.details())
                return
        else:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    log.error("%s did not hear of the fence of rank %d in %g s", endpoint, hello.rank, _GIVE_UP_S)
