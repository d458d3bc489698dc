"""A running cluster as the target of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from kvrelay.cli import client, fleet
from kvrelay.cli.eval_target import Answer
from kvrelay.cli.identity import Identity
from kvrelay.core.errors import UnavailableError
from kvrelay.proto.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc


class ClusterTarget:
    """Implements `eval_target.Target` over gRPC. Created by `connected`."""

    def __init__(self, channel: grpc.Channel, endpoint: str, *, num_workers: int, timeout_s: float) -> None:
        self.num_workers = num_workers
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._inference = inference_pb2_grpc.InferenceStub(channel)
        self._fleet = fleet_pb2_grpc.FleetStub(channel)
        self._info = self._inference.ModelInfo(inference_pb2.ModelInfoRequest(), timeout=fleet.CALL_TIMEOUT_S)
        self.max_model_len = self._info.max_model_len

    def describe(self) -> dict[str, Any]:
        reply = self._fleet.ListNodes(fleet_pb2.ListNodesRequest(), timeout=fleet.CALL_TIMEOUT_S)
        nodes = [fleet.as_dict(record) for record in reply.nodes]
        kept = ("name", "role", "ring_size", "dtype", "latent_format")
        return {
            "endpoint": self._endpoint,
            "model": self._info.model,
            "dtype": self._info.dtype,
            "nodes": [{key: node[key] for key in kept} for node in nodes],
        }

    def answer(self, prompt: str, *, chat: bool, max_tokens: int) -> Answer:
        request = inference_pb2.GenerateRequest(sampling=common_pb2.Sampling(max_tokens=max_tokens))
        if chat:
            request.chat.messages.add(role="user", content=prompt)
        else:
            request.text = prompt
        ids: list[int] = []
        text = ""
        usage = inference_pb2.Usage()
        for event in self._events(request):
            kind = event.WhichOneof("event")
            if kind == "tokens":
                ids += event.tokens.token_ids
                text += event.tokens.text
            elif kind == "finished":
                usage = event.finished.usage
        return Answer(tuple(ids), text, usage.prompt_tokens, usage.cached_tokens)

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        sampling = common_pb2.Sampling(max_tokens=1, prompt_logprobs=True)
        request = inference_pb2.GenerateRequest(tokens=client.token_prompt(ids), sampling=sampling)
        found: list[float] = []
        for event in self._events(request):
            if event.WhichOneof("event") == "prompt_logprobs":
                found += event.prompt_logprobs.logprobs
        return found

    def _events(self, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateEvent]:
        kind = None
        for event in self._inference.Generate(request, timeout=self._timeout_s):
            kind = event.WhichOneof("event")
            yield event
        if kind != "finished":
            raise UnavailableError(f"{self._endpoint}: the stream ended before the request did")


@contextmanager
def connected(
    endpoint: str, identity: Identity | None, *, num_workers: int, timeout_s: float
) -> Iterator[ClusterTarget]:
    """Reach a router for as long as the block lasts, in plain text without an identity.

    Raises:
        UnavailableError: a call failed; the text has the status and the server's words.
    """
    try:
        with client.connect(endpoint, identity) as channel:
            yield ClusterTarget(channel, endpoint, num_workers=num_workers, timeout_s=timeout_s)
    except grpc.RpcError as err:
        raise UnavailableError(": ".join(client.error_of(err))) from err
