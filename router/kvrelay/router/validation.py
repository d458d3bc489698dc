"""Requests are checked once, at the door, and become another type: only that one goes further in."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.core.errors import InvalidRequestError, UnknownModelError
from kvrelay.core.sampling_limits import MAX_STOP_TOKENS, check_sampling
from kvrelay.core.types import Sampling
from kvrelay.proto.convert import pack_ids, sampling_from_pb
from kvrelay.proto.v1 import common_pb2, inference_pb2
from kvrelay.router.admission import Slo

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
_SEED_BITS = 63
_SERVICE_CLASSES: dict[int, Slo] = {
    inference_pb2.SERVICE_CLASS_UNSPECIFIED: Slo.STANDARD,
    inference_pb2.SERVICE_CLASS_INTERACTIVE: Slo.INTERACTIVE,
    inference_pb2.SERVICE_CLASS_STANDARD: Slo.STANDARD,
    inference_pb2.SERVICE_CLASS_BATCH: Slo.BATCH,
}
_VALIDATED: Final = object()


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests must keep."""

    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool


@dataclass(frozen=True, slots=True, eq=False)
class ValidRequest:
    """A request that can be served; made by `validate` alone."""

    prompt_T: npt.NDArray[np.int32]
    packed_ids: bytes  # the prompt as messages have it
    sampling: Sampling
    stop_strings: tuple[str, ...]
    proof: object = field(repr=False)

    def __post_init__(self) -> None:
        assert self.proof is _VALIDATED, "only validate() makes these"

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_T)

    @property
    def total_tokens(self) -> int:
        """Longest that prompt and output can become."""
        return self.prompt_tokens + self.sampling.max_tokens


def check_model(wanted: str, limits: Limits) -> None:
    """
    Raises:
        UnknownModelError: the request names another model.
    """
    if wanted not in ("", limits.model):
        raise UnknownModelError(f"model {wanted!r} is not served here; {limits.model!r} is")


def service_class(wanted: int) -> Slo:
    """
    Raises:
        InvalidRequestError: there is no such class.
    """
    slo = _SERVICE_CLASSES.get(wanted)
    if slo is None:
        raise InvalidRequestError(f"service_class is {wanted}; known are 0 to {max(_SERVICE_CLASSES)}")
    return slo


def read_packed_ids(packed: bytes) -> npt.NDArray[np.uint32]:
    """Return the ids of a token prompt, whatever they are.

    Raises:
        InvalidRequestError: the length is no multiple of four.
    """
    if len(packed) % 4:
        raise InvalidRequestError(f"packed_ids has {len(packed)} bytes, which is not a multiple of 4")
    return np.frombuffer(packed, dtype="<u4")


def validate(
    ids_T: npt.NDArray[np.uint32 | np.int32],
    sampling: common_pb2.Sampling,
    limits: Limits,
    *,
    packed_ids: bytes | None = None,
) -> ValidRequest:
    """Check a request and fill in what it leaves open (seed, most tokens, end tokens).

    Args:
        packed_ids: the same ids, where they came as bytes: nodes get those.

    Raises:
        InvalidRequestError: names the value and the limit.
    """
    _check_prompt(ids_T, limits)
    _check_stops(sampling, limits)
    wanted = sampling_from_pb(sampling)
    check_sampling(wanted)
    room = limits.max_model_len - len(ids_T)
    max_tokens = sampling.max_tokens or max(1, room)
    if max_tokens > room:
        raise InvalidRequestError(
            f"{len(ids_T)} prompt tokens and max_tokens {max_tokens} are {len(ids_T) + max_tokens} in all; "
            f"the limit is {limits.max_model_len}"
        )
    prompt_T = ids_T.view(np.int32)
    prompt_T.flags.writeable = False
    ends = () if sampling.ignore_eos else limits.eos_token_ids
    complete = replace(
        wanted,
        max_tokens=max_tokens,
        seed=wanted.seed if sampling.HasField("seed") else secrets.randbits(_SEED_BITS),
        stop_token_ids=tuple(dict.fromkeys((*wanted.stop_token_ids, *ends))),
    )
    packed_ids = pack_ids(prompt_T) if packed_ids is None else packed_ids
    return ValidRequest(prompt_T, packed_ids, complete, tuple(sampling.stop_strings), _VALIDATED)


def _check_prompt(ids_T: npt.NDArray[np.uint32 | np.int32], limits: Limits) -> None:
    if not len(ids_T):
        raise InvalidRequestError("the prompt is empty; it needs at least one token")
    as_unsigned_T = ids_T.view(np.uint32)  # what is below 0 is then over every limit
    if int(as_unsigned_T.max()) >= limits.vocab_size:
        at = int((as_unsigned_T >= limits.vocab_size).argmax())
        raise InvalidRequestError(
            f"token id {int(ids_T[at])} at position {at} is not below the vocabulary size {limits.vocab_size}"
        )


def _check_stops(sampling: common_pb2.Sampling, limits: Limits) -> None:
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries; at most {MAX_STOP_TOKENS}"
        )
    for token_id in sampling.stop_token_ids:
        if token_id >= limits.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids has {token_id}, which is not below the vocabulary size {limits.vocab_size}"
            )
    if len(sampling.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop_strings has {len(sampling.stop_strings)} entries; at most {MAX_STOP_STRINGS}")
    for text in sampling.stop_strings:
        num_bytes = len(text.encode())
        if not 1 <= num_bytes <= MAX_STOP_STRING_BYTES:
            raise InvalidRequestError(
                f"stop_strings has one of {num_bytes} bytes; each must have 1 to {MAX_STOP_STRING_BYTES}"
            )
    if sampling.stop_strings and not limits.has_tokenizer:
        raise InvalidRequestError(f"stop_strings need a tokenizer, which model {limits.model!r} has not")
