"""A whole router over real gRPC and a real index server, in front of nodes that play a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from kvrelay.core.types import Incarnation
from kvrelay.index.registry import NodeRegistry
from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.server import Server, connect, serve
from kvrelay.proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    handoff_pb2,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from kvrelay.router.app import Router
from kvrelay.router.settings import RouterSettings
from played_decode import WithoutHandoffs
from played_prepared import WithPreparedCalls

MAX_BYTES = 8 << 20
TEXT = "One two three four five"  # what the nodes answer, one byte per token
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ANSWER = [ALPHABET.index("Ġ" if letter == " " else letter) for letter in TEXT]


@dataclass
class Played:
    """What both roles have in common."""

    aborted: list[str] = field(default_factory=list)
    renewed: set[str] = field(default_factory=set)
    drained: int = 0

    async def GiveTicket(self, request: Any, context: Any) -> prefill_pb2.GiveTicketReply:
        return prefill_pb2.GiveTicketReply()

    async def Abort(self, request: Any, context: Any) -> common_pb2.AbortReply:
        self.aborted.append(request.reason)
        return common_pb2.AbortReply(was_active=True)

    async def Renew(self, request: Any, context: Any) -> common_pb2.RenewReply:
        self.renewed.update(request.request_ids)
        return common_pb2.RenewReply()

    async def Drain(self, request: Any, context: Any) -> common_pb2.DrainReply:
        self.drained += 1
        return common_pb2.DrainReply(active_requests=7)

    async def Stats(self, request: Any, context: Any) -> common_pb2.NodeStats:
        return common_pb2.NodeStats()


@dataclass
class PlayedPrefill(Played, WithPreparedCalls):
    silent_s: float = 0.0
    calls: list[prefill_pb2.PrefillRequest] = field(default_factory=list)

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.calls.append(request)
        yield prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted(cached_tokens=0))
        yield prefill_pb2.PrefillEvent(progress=prefill_pb2.PrefillProgress(prefilled_tokens=2))
        await asyncio.sleep(self.silent_s)
        first = prefill_pb2.FirstToken(token=token(ANSWER[request.num_sent_tokens]), prefill_ms=1.0)
        if request.sampling.max_tokens == 1:
            first.finish_reason = common_pb2.FINISH_REASON_LENGTH
        yield prefill_pb2.PrefillEvent(first_token=first)
        yield prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone())


@dataclass
class PlayedDecode(Played, WithoutHandoffs):
    admit_after_s: float = 0.0
    step_s: float = 0.0
    reserved: list[decode_pb2.ReserveRequest] = field(default_factory=list)
    kept_from: dict[str, int] = field(default_factory=dict)  # pages, by a writer's name

    async def FenceWriter(self, request: Any, context: Any) -> decode_pb2.FenceWriterReply:
        return decode_pb2.FenceWriterReply(pages=self.kept_from.get(request.writer.name, 0))

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveReply:
        self.reserved.append(request)
        epoch = common_pb2.Epoch(decode=request.node, counter=len(self.reserved))
        return decode_pb2.ReserveReply(ticket=handoff_pb2.Ticket(epoch=epoch, request=request.request))

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeEvent]:
        reserved = self.reserved[request.epoch.counter - 1]
        await asyncio.sleep(self.admit_after_s)
        yield decode_pb2.DecodeEvent(admitted=decode_pb2.DecodeAdmitted(resident_tokens=0, verify_ms=0.1))
        for one in ANSWER[1 : reserved.sampling.max_tokens]:
            await asyncio.sleep(self.step_s)
            yield decode_pb2.DecodeEvent(tokens=decode_pb2.DecodeTokens(tokens=[token(one)]))
        yield decode_pb2.DecodeEvent(done=decode_pb2.DecodeDone(reason=common_pb2.FINISH_REASON_LENGTH))


def model_of_bytes(folder: Path) -> Path:
    """Write a model folder with a tokenizer that has a token for every byte."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": 256, "max_position_embeddings": 512, "eos_token_id": 255}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    return folder


def token(token_id: int) -> common_pb2.SampledToken:
    return common_pb2.SampledToken(token_id=token_id)


@dataclass
class Stage:
    """A router with its nodes, and a client."""

    router: Router
    prefill: PlayedPrefill
    decode: PlayedDecode
    registry: NodeRegistry
    inference: inference_pb2_grpc.InferenceAsyncStub
    fleet: fleet_pb2_grpc.FleetAsyncStub
    channel: aio.Channel
    records: list[fleet_pb2.NodeRecord]
    endpoint: str

    async def run(self, request: inference_pb2.GenerateRequest, **options: Any) -> list[inference_pb2.GenerateEvent]:
        return [event async for event in self.inference.Generate(request, **options)]

    async def fails(self, request: inference_pb2.GenerateRequest, **options: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(aio.AioRpcError) as caught:
            await self.run(request, **options)
        return caught.value.code(), caught.value.details() or ""

    async def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)


async def _serve(servicer: PlayedPrefill | PlayedDecode) -> Server:
    def add(server: aio.Server) -> None:
        if isinstance(servicer, PlayedPrefill):
            prefill_pb2_grpc.add_PrefillNodeServicer_to_server(servicer, server)
        else:
            decode_pb2_grpc.add_DecodeNodeServicer_to_server(servicer, server)

    return await serve(listen="127.0.0.1:0", add_services=add, services=[], max_message_bytes=MAX_BYTES)


def _record(name: str, role: Any, endpoint: str, **changes: Any) -> fleet_pb2.NodeRecord:
    plain: dict[str, Any] = {
        "layout_fingerprint": b"layout", "ring_size": 1, "max_model_len": 256, "block_tokens": 64, "page_tokens": 64,
        "total_pages": 100, "free_pages": 100, "dtype": "float32",
    }  # fmt: skip
    node = convert.incarnation_to_pb(Incarnation.new(name))
    return fleet_pb2.NodeRecord(node=node, role=role, endpoint=endpoint, **(plain | changes))


@asynccontextmanager
async def playing(
    index: EmbeddedServer,
    model: Path,
    *,
    prefill: PlayedPrefill | None = None,
    decode: PlayedDecode | None = None,
    register: Sequence[str] = ("prefill", "decode"),
    decode_layout: bytes = b"layout",
    **settings: Any,
) -> AsyncIterator[Stage]:
    prefill, decode = prefill or PlayedPrefill(), decode or PlayedDecode()
    servers = [await _serve(prefill), await _serve(decode)]
    fleet = Incarnation.new("f")
    registry = NodeRegistry(index.url, f"f{fleet.start_id}")
    records = [
        _record("prefill", fleet_pb2.NODE_ROLE_PREFILL, servers[0].endpoint, takes_prepared_calls=True),
        _record("decode", fleet_pb2.NODE_ROLE_DECODE, servers[1].endpoint, layout_fingerprint=decode_layout),
    ]
    for record in records:
        if record.node.name in register:
            await registry.register(record, ttl_s=60)
    plain: dict[str, Any] = {
        "model": str(model), "index_url": index.url, "fleet": f"f{fleet.start_id}", "max_message_mib": 1,
        "registry_refresh_s": 0.05, "served_name": "m", "lease_s": 0.6,
    }  # fmt: skip
    router = Router(RouterSettings(**(plain | settings)))
    endpoint = await router.start()
    channel = connect(endpoint, max_message_bytes=MAX_BYTES)
    inference, fleet_stub = inference_pb2_grpc.InferenceStub(channel), fleet_pb2_grpc.FleetStub(channel)
    try:
        yield Stage(router, prefill, decode, registry, inference, fleet_stub, channel, records, endpoint)
    finally:
        await channel.close()
        await router.stop()
        await registry.close()
        for server in servers:
            await server.stop(0)


def asked(text: str = "hello", **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, sampling=common_pb2.Sampling(**{"max_tokens": 8, **sampling}))


def said(events: Sequence[inference_pb2.GenerateEvent]) -> str:
    return "".join(event.tokens.text for event in events)


def ids(events: Sequence[inference_pb2.GenerateEvent]) -> list[int]:
    return [one for event in events for one in event.tokens.token_ids]


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is on the other side of a connection
            await asyncio.sleep(0.01)
