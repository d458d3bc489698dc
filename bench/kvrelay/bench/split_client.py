"""The client of a split cluster, and of a served mixed node, in a process of its own that knows no models or devices.

What else the bench did would show as late tokens: in its own process, which had written a checkpoint with torch, the
client stood still for 92 to 142 ms once in a first round, while the loops of router and nodes went on.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np
import numpy.typing as npt

from kvrelay.bench import order_process
from kvrelay.bench.gaps import Beside
from kvrelay.bench.timed import Timed
from kvrelay.core.errors import UnavailableError
from kvrelay.proto import convert
from kvrelay.proto.server import connect
from kvrelay.proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc

Ids = npt.NDArray[np.int64]
_MESSAGE_BYTES = 64 << 20
_REQUEST_S = 300.0
_SETTLE_TOKENS = 16  # of each running request, before anything is measured


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, with nothing beside it."""

    prompt: Ids
    num_tokens: int
    of: int = 0  # which of the endpoints


@dataclass(frozen=True, slots=True)
class Watch:
    """Requests that run, and prompts that are sent together while they do."""

    contexts: Sequence[Ids]  # prompts of the running requests
    prompts: Sequence[Ids]
    running_tokens: int  # most that each of them generates
    alone_s: float  # with the running requests only, before the prompts


def request_of(prompt: Ids, num_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(packed_ids=convert.pack_ids(prompt.astype(np.int32))),
        sampling=common_pb2.Sampling(max_tokens=num_tokens, ignore_eos=True),
        service_class=inference_pb2.SERVICE_CLASS_BATCH,
    )


def serve(*endpoints: str) -> order_process.Obey:
    """Return what obeys `Answer`, and `Watch` at the first endpoint."""
    options = [("grpc.max_send_message_length", _MESSAGE_BYTES)]
    channels = [grpc.insecure_channel(one, options=options) for one in endpoints]

    def obey(order: Answer | Watch) -> tuple[Timed, dict[str, float]] | Beside:
        if isinstance(order, Answer):
            return answer(channels[order.of], order)
        return asyncio.run(watch(endpoints[0], order))

    return obey


def answer(channel: grpc.Channel, order: Answer) -> tuple[Timed, dict[str, float]]:
    """Return when each token of one request came, and where the time went as the router saw it, in ms."""
    request = request_of(order.prompt, order.num_tokens)
    ids: list[int] = []
    at_s: list[float] = []
    split = inference_pb2.TimeSplit()
    began_s = time.perf_counter()
    for event in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=_REQUEST_S):
        now_s = time.perf_counter() - began_s
        ids += event.tokens.token_ids
        at_s += [now_s] * len(event.tokens.token_ids)
        if event.HasField("finished"):
            split = event.finished.time
    return Timed(tuple(ids), tuple(at_s)), {field.name: getattr(split, field.name) for field in split.DESCRIPTOR.fields}


class _Stream:
    """One running request: when its messages came."""

    def __init__(self) -> None:
        self.moments_s: list[float] = []
        self.tokens = 0
        self.settled = asyncio.Event()

    async def follow(self, stub: inference_pb2_grpc.InferenceAsyncStub, request: inference_pb2.GenerateRequest) -> None:
        try:
            async for event in stub.Generate(request, timeout=_REQUEST_S):
                if event.tokens.token_ids:
                    self.moments_s.append(time.perf_counter())
                    self.tokens += len(event.tokens.token_ids)
                    if self.tokens >= _SETTLE_TOKENS:
                        self.settled.set()
        finally:
            self.settled.set()

    def between(self, first_s: float, end_s: float) -> list[float]:
        """Return the moments of a window, with the last one before it."""
        inside = [at_s for at_s in self.moments_s if first_s <= at_s <= end_s]
        before = [at_s for at_s in self.moments_s if at_s < first_s]
        return before[-1:] + inside


async def watch(endpoint: str, order: Watch) -> Beside:
    """Return what was seen until the last prompt's second token.

    Raises:
        UnavailableError: a running request ended before that, by an error or as it needs more tokens.
    """
    channel = connect(endpoint, max_message_bytes=_MESSAGE_BYTES, tls=None)
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    streams = [_Stream() for _ in order.contexts]
    running_requests = [request_of(prompt, order.running_tokens) for prompt in order.contexts]
    long_requests = [request_of(prompt, 2) for prompt in order.prompts]
    gc.collect()
    gc.disable()  # a collection here would look like a late token
    try:
        running = [
            asyncio.create_task(stream.follow(stub, request))
            for stream, request in zip(streams, running_requests, strict=True)
        ]
        await asyncio.gather(*(stream.settled.wait() for stream in streams))
        began_s = time.perf_counter()
        await asyncio.sleep(order.alone_s)
        sent_s = time.perf_counter()
        firsts_s = await asyncio.gather(*(_first_token_s(stub, request) for request in long_requests))
        ended_s = time.perf_counter()
        ended_early = [task for task in running if task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if ended_early:
            why = ended_early[0].exception() or f"each may have {order.running_tokens} tokens"
            raise UnavailableError(f"{len(ended_early)} running requests ended before the prompts: {why}")
    finally:
        gc.enable()
        await channel.close()
    return Beside(
        [stream.between(began_s, sent_s) for stream in streams],
        [stream.between(sent_s, ended_s) for stream in streams],
        [first_s - sent_s for first_s in firsts_s],
        sum(stream.tokens - len(stream.moments_s) for stream in streams),
    )


async def _first_token_s(stub: inference_pb2_grpc.InferenceAsyncStub, request: inference_pb2.GenerateRequest) -> float:
    """Run a prompt to its second token; return when the first one came."""
    came_s = 0.0
    async for event in stub.Generate(request, timeout=_REQUEST_S):
        if event.tokens.token_ids and not came_s:
            came_s = time.perf_counter()
    return came_s
