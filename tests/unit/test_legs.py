"""The two streams of an attempt: what a slow client leaves unread stays with the nodes, not in the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvrelay.core.types import Incarnation, Role
from kvrelay.proto.v1 import decode_pb2
from kvrelay.router.legs import MAX_QUEUED, Legs

TOTAL = 20 * MAX_QUEUED


class Told:
    """A call to a decode node that tells as fast as it is listened to."""

    def __init__(self) -> None:
        self.count, self.cancelled = 0, False

    def cancel(self) -> bool:
        self.cancelled = True
        return True

    async def __aiter__(self) -> AsyncIterator[decode_pb2.DecodeEvent]:
        for at in range(TOTAL):
            self.count += 1
            yield decode_pb2.DecodeEvent(admitted=decode_pb2.DecodeAdmitted(resident_tokens=at))


async def test_a_client_that_does_not_read_holds_up_its_own_nodes_and_fills_no_memory() -> None:
    told, legs = Told(), Legs({Role.DECODE: Incarnation("d", 1)})
    legs.start(Role.DECODE, told)
    for _ in range(3 * TOTAL):  # the pump could run to its end by then
        await asyncio.sleep(0)
    assert told.count <= MAX_QUEUED + 1

    seen: list[int] = []
    while len(seen) < 3 * MAX_QUEUED:
        message = await legs.next(1.0)
        assert isinstance(message, decode_pb2.DecodeEvent)
        seen.append(message.admitted.resident_tokens)
        assert told.count <= len(seen) + MAX_QUEUED + 1
    assert seen == list(range(3 * MAX_QUEUED))
    await legs.stop_all()


async def test_all_of_a_long_stream_arrives_in_order_and_then_its_end() -> None:
    legs = Legs({Role.DECODE: Incarnation("d", 1)})
    legs.start(Role.DECODE, Told())
    seen: list[int] = []
    while not legs.ended(Role.DECODE):
        if (message := await legs.next(1.0)) is not None:
            assert isinstance(message, decode_pb2.DecodeEvent)
            seen.append(message.admitted.resident_tokens)

    assert seen == list(range(TOTAL))


async def test_a_leg_that_waits_for_its_reader_can_be_stopped() -> None:
    told, legs = Told(), Legs({Role.DECODE: Incarnation("d", 1)})
    legs.start(Role.DECODE, told)
    for _ in range(3 * MAX_QUEUED):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await legs.stop(Role.DECODE)
    count = told.count
    await asyncio.sleep(0.01)
    assert told.count == count


async def test_a_leg_that_was_stopped_before_it_had_begun_leaves_no_call_behind() -> None:
    told, legs = Told(), Legs({Role.DECODE: Incarnation("d", 1)})
    legs.start(Role.DECODE, told)
    await legs.stop(Role.DECODE)
    assert (told.count, told.cancelled) == (0, True)
