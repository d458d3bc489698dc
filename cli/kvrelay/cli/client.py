"""The client side of the gRPC API: a channel that retries, and events as plain dictionaries."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, cast

import grpc

from kvrelay.cli.identity import Identity
from kvrelay.proto.tls import CHANNEL_OPTIONS
from kvrelay.proto.v1 import inference_pb2 as pb

MAX_MESSAGE_BYTES = 1 << 30  # the router has the limit and names it
# A call that failed before its first event may be sent again; gRPC never repeats one that already answered.
SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],  # over all routers behind one name
    "healthCheckConfig": {"serviceName": "kvrelay.v1.Inference"},  # that are well and not leaving
    "methodConfig": [
        {
            "name": [{"service": "kvrelay.v1.Inference"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
# A router that was away is found again within a second, before the others of a rolling restart go. gRPC's own pauses
# between two tries grow to two minutes, while the retries above last three seconds.
RECONNECT: list[tuple[str, str | int]] = [
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_TIMES = [field.name for field in pb.TimeSplit.DESCRIPTOR.fields]
_CONFIDENCE_PREFIX = "INDEX_CONFIDENCE_"
_REASON_PREFIX = "FINISH_REASON_"


def connect(endpoint: str, identity: Identity | None = None, *, watch_health: bool = False) -> grpc.Channel:
    """Return a channel to a router, in plain text without an identity; connects lazily.

    Args:
        watch_health: send nothing to a router that is not serving. For several routers: a single one has better words.
    """
    kept = {name: part for name, part in SERVICE_CONFIG.items() if watch_health or name != "healthCheckConfig"}
    options: list[tuple[str, str | int]] = [
        ("grpc.service_config", json.dumps(kept)),
        *RECONNECT,
        ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),  # a request above it would never be sent again
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]
    if identity is None:
        return grpc.insecure_channel(endpoint, options=options)
    return grpc.secure_channel(endpoint, identity.credentials(), options=[*options, *CHANNEL_OPTIONS])


def token_prompt(ids: Sequence[int]) -> pb.TokenPrompt:
    """Return packed token ids.

    Raises:
        struct.error: an id is not in [0, 2**32).
    """
    return pb.TokenPrompt(packed_ids=struct.pack(f"<{len(ids)}I", *ids))


def as_dict(event: pb.GenerateEvent) -> dict[str, Any]:
    """Return an event as a JSON object with an `event` field; times in ms."""
    kind = event.WhichOneof("event")
    if kind == "accepted":
        accepted = event.accepted
        return {
            "event": kind,
            "request_id": accepted.request_id,
            "nodes": _placement(accepted.nodes),
            "prompt_tokens": accepted.prompt_tokens,
            "seed": accepted.seed,
        }
    if kind == "progress":
        progress = event.progress
        return {
            "event": kind,
            "prefilled_tokens": progress.prefilled_tokens,
            "prompt_tokens": progress.prompt_tokens,
            "eta_ms": progress.eta_ms,
        }
    if kind == "prompt_logprobs":
        scored = event.prompt_logprobs
        return {"event": kind, "first_position": scored.first_position, "logprobs": list(scored.logprobs)}
    if kind == "tokens":
        return _tokens(event.tokens)
    assert kind == "finished", f"event {kind}"
    finished = event.finished
    return {
        "event": kind,
        "finish_reason": pb_name(finished.DESCRIPTOR.fields_by_name["reason"], finished.reason, _REASON_PREFIX),
        "usage": {field.name: getattr(finished.usage, field.name) for field in pb.Usage.DESCRIPTOR.fields},
        "nodes": _placement(finished.nodes),
        "time": {name: round(getattr(finished.time, name), 3) for name in _TIMES},
    }


def error_of(err: grpc.RpcError) -> tuple[str, str]:
    """Return (status name, text) of a failed call."""
    call = cast(grpc.Call, err)  # a failed call is both, which the stubs cannot say
    text = call.details() or "no details"
    # What a router says may end in the same words: then it is a node that it could not reach.
    if "Connection refused" in text and not call.trailing_metadata():
        text += " (nothing listens there: `kvrelay up` starts a cluster, --endpoint names another router)"
    return call.code().name, text


def pb_name(field: Any, number: int, prefix: str) -> str:
    """Return the lower-case name of an enum value without its prefix."""
    name: str = field.enum_type.values_by_number[number].name
    return name.removeprefix(prefix).lower()


def _placement(nodes: pb.Placement) -> dict[str, Any]:
    confidence = nodes.DESCRIPTOR.fields_by_name["index_confidence"]
    return {
        "prefill_node": nodes.prefill_node,
        "decode_node": nodes.decode_node,
        "ring_size": nodes.ring_size,
        "index_confidence": pb_name(confidence, nodes.index_confidence, _CONFIDENCE_PREFIX),
    }


def _tokens(tokens: pb.Tokens) -> dict[str, Any]:
    found: dict[str, Any] = {"event": "tokens", "token_ids": list(tokens.token_ids), "text": tokens.text}
    if tokens.logprobs:
        found["logprobs"] = [
            {
                "token_id": one.token_id,
                "logprob": one.logprob,
                "top": [{"token_id": top.token_id, "logprob": top.logprob} for top in one.top],
            }
            for one in tokens.logprobs
        ]
    return found
