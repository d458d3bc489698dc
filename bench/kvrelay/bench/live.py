"""A client that notes when each token of its requests came."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from grpc import aio

from kvrelay.bench.prompts import Prompt
from kvrelay.core.grpc_status import RETRY_AFTER_KEY
from kvrelay.proto import convert
from kvrelay.proto.server import connect
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from kvrelay.router.admission import Slo

_MAX_MESSAGE_BYTES = 64 << 20
_CLASSES = {
    Slo.INTERACTIVE: inference_pb2.SERVICE_CLASS_INTERACTIVE,
    Slo.STANDARD: inference_pb2.SERVICE_CLASS_STANDARD,
    Slo.BATCH: inference_pb2.SERVICE_CLASS_BATCH,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one request. Times count from when it was due."""

    status: str  # of gRPC; OK = finished
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()  # between tokens; those of one message share the time since the last one
    prompt_tokens: int = 0
    cached_tokens: int = 0
    confidence: str = ""
    retry_after_s: float | None = None  # what a refusal said


class Client:
    """Of one router. No retries: what is refused is a result."""

    def __init__(self, channel: aio.Channel, token: str) -> None:
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    @classmethod
    @asynccontextmanager
    async def connected(cls, endpoint: str, *, tls: Tls | None, token: str) -> AsyncIterator[Client]:
        channel = connect(endpoint, max_message_bytes=_MAX_MESSAGE_BYTES, tls=tls)
        try:
            yield cls(channel, token)
        finally:
            await channel.close()

    async def limits(self) -> inference_pb2.ModelInfoReply:
        return await self._stub.ModelInfo(inference_pb2.ModelInfoRequest(), metadata=self._metadata)

    async def generate(self, prompt: Prompt, *, due_s: float, slo: Slo, timeout_s: float) -> Outcome:
        """Send one request and follow it to its end.

        Args:
            due_s: when it should have begun, by time.perf_counter.
        """
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(packed_ids=convert.pack_ids(prompt.token_ids)),
            sampling=common_pb2.Sampling(max_tokens=prompt.output_tokens, ignore_eos=True),
            service_class=_CLASSES[slo],
        )
        at_s: list[float] = []
        finished = inference_pb2.Finished()
        try:
            async for event in self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata):
                at_s += [time.perf_counter() - due_s] * len(event.tokens.token_ids)
                if event.HasField("finished"):
                    finished = event.finished
        except aio.AioRpcError as err:
            hints = {str(key): str(value) for key, value in err.trailing_metadata() or ()}
            after = float(hints[RETRY_AFTER_KEY]) / 1e3 if RETRY_AFTER_KEY in hints else None
            return Outcome(err.code().name, retry_after_s=after)
        return Outcome(
            "OK",
            at_s[0],
            tuple(_gaps(at_s)),
            finished.usage.prompt_tokens,
            finished.usage.cached_tokens,
            inference_pb2.IndexConfidence.Name(finished.nodes.index_confidence)
            .removeprefix("INDEX_CONFIDENCE_")
            .lower(),
        )


def _gaps(at_s: list[float]) -> list[float]:
    """Return the time between tokens; tokens that came together share it evenly."""
    moments = sorted(set(at_s))
    gaps: list[float] = []
    for before, moment in pairwise(moments):
        together = at_s.count(moment)
        gaps += [(moment - before) / together] * together
    return gaps
