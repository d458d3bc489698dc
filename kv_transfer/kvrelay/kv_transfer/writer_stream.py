"""One rank's Attach stream, seen from the writer; attach_stream.py is the other end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from kvrelay.core.clock import Clock
from kvrelay.core.errors import UnavailableError
from kvrelay.core.grpc_status import from_rpc_error
from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters
from kvrelay.kv_transfer import writer_table as wt
from kvrelay.kv_transfer.late_word import say_fenced
from kvrelay.kv_transfer.local import Limits
from kvrelay.kv_transfer.values import FenceProof, Manifest
from kvrelay.kv_transfer.wire import manifest_to_pb_on_loop, proof_to_pb
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import decode_pb2_grpc, handoff_pb2

_GOODBYE_S = 2.0  # for decode to read our last words


class WriterStream:
    """What a rank says to decode, in order, and what it hears. Owned by the event loop.

    Its fence reaches decode also when the stream that should have carried it breaks.
    """

    def __init__(
        self,
        hello: handoff_pb2.AttachHello,
        *,
        endpoint: str,
        row_bytes: int,
        on_event: Callable[[wt.WriterEvent], None],
        counters: Counters,
        limits: Limits,
        name: str,
        clock: Clock,
    ) -> None:
        """
        Args:
            endpoint: host:port of decode.
            on_event: told what decode says, and that the stream is over.
            name: of the hand-off, for the names of tasks.
        """
        self.hello = hello
        self._endpoint, self._row_bytes, self._on_event = endpoint, row_bytes, on_event
        self._counters, self._limits, self._name, self._clock = counters, limits, name, clock
        self._outbox: asyncio.Queue[handoff_pb2.WriterEvent | Manifest | None] = asyncio.Queue()
        self._attached = False
        self._refused = False  # decode has let in nobody, or another one
        self._converses = True  # what is put into the outbox will be said
        self._proof: FenceProof | None = None  # of our fence, once there is one
        self._late: asyncio.Task[None] | None = None

    async def run(self, done: asyncio.Future[Any]) -> None:
        """Converse until `done` has a result, and a little longer, for decode to read our last words."""
        async with connect(
            self._endpoint, max_message_bytes=self._limits.max_message_bytes, tls=self._limits.tls
        ) as channel:
            conversation = keep(self._converse(channel), name=f"conversation of {self._name}")
            await asyncio.wait((done,))
            self._outbox.put_nowait(None)
            self._converses = False  # a fence that comes while decode reads our last words is not among them
            await asyncio.wait((conversation,), timeout=_GOODBYE_S)
            conversation.cancel()
            await asyncio.wait((conversation,))

    def say_manifest(self, manifest: Manifest) -> None:
        self._outbox.put_nowait(manifest)

    def say_abort(self, reason: str) -> None:
        self._outbox.put_nowait(handoff_pb2.WriterEvent(abort=handoff_pb2.WriterAbort(reason=reason)))

    def say_fence(self, proof: FenceProof) -> None:
        """Say it in the stream, and if that is lost or over, outside of it."""
        self._proof = proof
        self._outbox.put_nowait(handoff_pb2.WriterEvent(fenced=proof_to_pb(proof)))
        if not self._converses:
            self._say_late()

    async def _converse(self, channel: aio.Channel) -> None:
        why, heard_all = "decode ended the stream", False
        try:
            async for event in decode_pb2_grpc.DecodeNodeStub(channel).Attach(self._say()):
                self._hear(event)
            heard_all = True
        except aio.AioRpcError as err:
            lost = from_rpc_error(err, peer=self._endpoint)
            why, heard_all = str(lost), not isinstance(lost, UnavailableError)
            self._refused = heard_all and not self._attached
        finally:
            self._converses = False
            if not heard_all:
                self._say_late()
        self._on_event(wt.StreamLost(why))

    async def _say(self) -> AsyncIterator[handoff_pb2.WriterEvent]:
        yield handoff_pb2.WriterEvent(hello=self.hello)
        while (event := await self._outbox.get()) is not None:
            if isinstance(event, Manifest):
                manifest = await manifest_to_pb_on_loop(event, row_bytes=self._row_bytes)
                event = handoff_pb2.WriterEvent(manifest=manifest)
            yield event

    def _hear(self, event: handoff_pb2.ReaderEvent) -> None:
        match event.WhichOneof("event"):
            case "attached":
                self._attached = True
                self._on_event(wt.Attached())
            case "admitted":
                self._on_event(wt.Admitted())
            case "abort":
                self._on_event(wt.GiveUp(f"decode gave up: {event.abort.reason}", tell_reader=False))
            case _:
                pass  # closed: the reader is done with everybody; nothing follows for us

    def _say_late(self) -> None:
        """Say the fence, if there is one yet, outside of a stream that may have lost it.

        Also when decode's yes was not heard: it may have been said. Whoever was refused has no fence to speak of.
        """
        if not self._refused and self._proof is not None and self._late is None:
            self._counters.add("fences_said_late_total")
            told = say_fenced(self._endpoint, self.hello, self._proof, limits=self._limits, clock=self._clock)
            self._late = keep(told, name=f"fence of {self._name}")
