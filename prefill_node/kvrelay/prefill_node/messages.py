"""What the PrefillNode service says and hears, as messages."""

from __future__ import annotations

from typing import Any

from grpc import aio

from kvrelay.core import tracing
from kvrelay.core.clock import monotonic
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import PromptLogprobs
from kvrelay.prefill_node.fills import PullFrom
from kvrelay.prefill_node.intake import NodeFacts
from kvrelay.prefill_node.job_events import Done, Failed, FirstToken, JobEvent, Progress, Started
from kvrelay.proto.convert import finish_to_pb, incarnation_from_pb, prompt_logprobs_to_pb, sampled_to_pb
from kvrelay.proto.v1 import prefill_pb2


def event_to_pb(event: JobEvent, received_s: float, pulled_tokens: int) -> prefill_pb2.PrefillEvent:
    """Return what a caller is told of an event.

    Args:
        received_s: when the request came, on the monotonic clock.
        pulled_tokens: that were fetched for it.

    Raises:
        ServeError: the event says that the job failed.
    """
    match event:
        case Started():
            started = prefill_pb2.PrefillStarted(
                cached_tokens=event.cached_tokens,
                queue_ms=event.queue_ms,
                pulled_tokens=min(pulled_tokens, event.cached_tokens),
            )
            return prefill_pb2.PrefillEvent(started=started)
        case Progress():
            progress = prefill_pb2.PrefillProgress(prefilled_tokens=event.prefilled_tokens)
            return prefill_pb2.PrefillEvent(progress=progress)
        case PromptLogprobs():
            return prefill_pb2.PrefillEvent(prompt_logprobs=prompt_logprobs_to_pb(event))
        case FirstToken():
            first = prefill_pb2.FirstToken(
                token=sampled_to_pb(event.token),
                finish_reason=finish_to_pb(event.finish_reason),
                prefill_ms=(monotonic() - received_s) * 1e3,
                compute_ms=event.compute_s * 1e3,
            )
            return prefill_pb2.PrefillEvent(first_token=first)
        case Done():
            return prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone(relayed_bytes=event.relayed_bytes))
        case Failed():
            raise event.error


def limit_of(request: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any], facts: NodeFacts) -> float:
    """Return the time that is left for a request: what it says itself, or else its call."""
    if request.timeout_ms:
        return request.timeout_ms / 1e3
    remaining_s = context.time_remaining()
    return facts.max_request_s if remaining_s is None else remaining_s


def trace_of(request: prefill_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]) -> tracing.Trace | None:
    """Return the place in a trace that a request comes from."""
    if request.traceparent:
        return tracing.Trace.parse(request.traceparent)
    return tracing.incoming(context.invocation_metadata())


def source_of(request: prefill_pb2.PrefillRequest) -> PullFrom | None:
    """Return from where to pull, if at all.

    Raises:
        InvalidRequestError: it has no address.
    """
    if not request.HasField("pull_from"):
        return None
    source = request.pull_from
    if not source.endpoint:
        raise InvalidRequestError("pull_from has no endpoint")
    return PullFrom(incarnation_from_pb(source.node), source.endpoint, source.tokens, max(1, source.ring_size))
