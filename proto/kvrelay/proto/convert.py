"""Messages to core types and back: the only place that knows both. Servicers call it at their edge."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvrelay.core.clock import MAX_TIME_LIMIT_S
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.shard import Span
from kvrelay.core.types import (
    Epoch,
    FinishReason,
    Incarnation,
    PageRun,
    PromptLogprobs,
    SampledToken,
    Sampling,
    TokenLogprob,
)
from kvrelay.proto.v1 import common_pb2, handoff_pb2

_MAX_REQUEST_ID_BYTES = 128  # nodes remember thousands of them
_FINISH: dict[FinishReason, common_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_BACK = {value: key for key, value in _FINISH.items()}


def ms_to_pb(seconds: float) -> int:
    """Return a time as the milliseconds of a uint32 field: at least 1, as 0 means none, and at most what fits."""
    return int(min(max(1.0, seconds * 1e3), MAX_TIME_LIMIT_S * 1e3))


def pack_ids(token_ids: npt.ArrayLike) -> bytes:
    """Return token ids as little-endian uint32 bytes."""
    ids = np.asarray(token_ids)
    if ids.dtype != np.dtype("<i4"):  # whose bytes they are already
        ids = ids.astype("<u4", copy=False)
    return ids.tobytes()


def unpack_ids(packed: bytes) -> npt.NDArray[np.int32]:
    """Return packed token ids as int32, in memory of their own.

    Raises:
        InvalidRequestError: as `view_ids`.
    """
    return view_ids(packed).copy()


def view_ids(packed: bytes) -> npt.NDArray[np.int32]:
    """Return packed token ids as int32 where they lie; not to be written to.

    Raises:
        InvalidRequestError: the length is no multiple of four, or an id does not fit 31 bits.
    """
    if len(packed) % 4:
        raise InvalidRequestError(f"packed token ids are {len(packed)} bytes, not a multiple of 4")
    ids = np.frombuffer(packed, dtype="<u4")
    if ids.size and int(ids.max()) > 0x7FFFFFFF:
        raise InvalidRequestError(f"token id {int(ids.max())} is over the limit of {0x7FFFFFFF}")
    return ids.view("<i4")


def check_request_id(request_id: str) -> None:
    """
    Raises:
        InvalidRequestError: it is empty, or too long to be remembered.
    """
    num_bytes = len(request_id.encode())
    if not 1 <= num_bytes <= _MAX_REQUEST_ID_BYTES:
        raise InvalidRequestError(f"a request id of {num_bytes} bytes; it must have 1 to {_MAX_REQUEST_ID_BYTES}")


def incarnation_from_pb(message: common_pb2.Incarnation) -> Incarnation:
    return Incarnation(message.name, message.start_id)


def incarnation_to_pb(value: Incarnation) -> common_pb2.Incarnation:
    return common_pb2.Incarnation(name=value.name, start_id=value.start_id)


def epoch_from_pb(message: common_pb2.Epoch) -> Epoch:
    return Epoch(incarnation_from_pb(message.decode), message.counter)


def epoch_to_pb(value: Epoch) -> common_pb2.Epoch:
    return common_pb2.Epoch(decode=incarnation_to_pb(value.decode), counter=value.counter)


def sampling_from_pb(message: common_pb2.Sampling) -> Sampling:
    """Return the values as they are; see `check_sampling`."""
    return Sampling(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs,
    )


def sampling_to_pb(value: Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        max_tokens=value.max_tokens,
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        min_p=value.min_p,
        repetition_penalty=value.repetition_penalty,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        seed=value.seed,
        stop_token_ids=value.stop_token_ids,
        logprobs=value.logprobs,
        prompt_logprobs=value.prompt_logprobs,
    )


def logprob_from_pb(message: common_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)


def logprob_to_pb(value: TokenLogprob) -> common_pb2.TokenLogprob:
    top = [common_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in value.top]
    return common_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top)


def prompt_logprobs_from_pb(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(message.first_position, tuple(message.logprobs))


def prompt_logprobs_to_pb(value: PromptLogprobs) -> common_pb2.PromptLogprobs:
    return common_pb2.PromptLogprobs(first_position=value.first_position, logprobs=value.logprobs)


def sampled_from_pb(message: common_pb2.SampledToken) -> SampledToken:
    logprob = logprob_from_pb(message.logprob) if message.HasField("logprob") else None
    return SampledToken(message.token_id, logprob)


def sampled_to_pb(value: SampledToken) -> common_pb2.SampledToken:
    logprob = None if value.logprob is None else logprob_to_pb(value.logprob)
    return common_pb2.SampledToken(token_id=value.token_id, logprob=logprob)


def finish_from_pb(reason: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    return _FINISH_BACK.get(reason)


def finish_to_pb(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH[reason]


def runs_from_pb(messages: Iterable[handoff_pb2.PageRun]) -> tuple[PageRun, ...]:
    return tuple(PageRun(message.first_page, message.num_pages) for message in messages)


def runs_to_pb(runs: Iterable[PageRun]) -> list[handoff_pb2.PageRun]:
    return [handoff_pb2.PageRun(first_page=run.first_page, num_pages=run.num_pages) for run in runs]


def span_from_pb(message: handoff_pb2.TokenRange) -> Span:
    return Span(message.start, message.end)


def span_to_pb(span: Span) -> handoff_pb2.TokenRange:
    return handoff_pb2.TokenRange(start=span.start, end=span.end)
