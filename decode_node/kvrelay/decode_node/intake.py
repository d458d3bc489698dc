"""What speaks against a request before pages are taken. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core import hash_on_loop
from kvrelay.core.errors import InvalidRequestError, LayoutMismatchError, UnavailableError
from kvrelay.core.layout import PageLayout
from kvrelay.core.sampling_limits import check_sampling
from kvrelay.core.types import Incarnation
from kvrelay.decode_node.requests import Ask
from kvrelay.kv_transfer.values import MAX_RING_SIZE


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    max_model_tokens: int  # prompt plus output
    vocab_size: int
    cache_window_tokens: int | None  # longer requests neither use nor fill the prefix cache; None = no such limit
    local_tokens: int = 0  # prompt tokens that may wait to be computed here instead of handed over


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs."""

    prompt_tokens: int
    max_tokens: int  # to generate
    hashes: list[bytes] | None  # of the prompt's full blocks; None: the prefix cache is not for this request
    wants_logprobs: bool = False  # of the prompt: all of it must be computed by prefill


async def judge(ask: Ask, *, node: Incarnation, layout: PageLayout, limits: Limits) -> Demand:
    """Return what a request needs.

    Raises:
        UnavailableError: the router means another incarnation of this node.
        LayoutMismatchError: it means pages of another layout.
        InvalidRequestError: nobody could serve it; names the value and the limit.
    """
    if ask.node != node:
        raise UnavailableError(f"this is {node}, not {ask.node}")
    if ask.fingerprint != layout.fingerprint:
        raise LayoutMismatchError(
            f"layout {ask.fingerprint.hex()} is asked for, {node.name} has {layout.fingerprint.hex()}"
        )
    if not ask.request.request_id:
        raise InvalidRequestError("the request has no id")
    if not 1 <= ask.ring_size <= MAX_RING_SIZE:
        raise InvalidRequestError(f"ring size {ask.ring_size} is outside [1, {MAX_RING_SIZE}]")
    check_sampling(ask.sampling)
    prompt_tokens = int(ask.prompt_T.shape[0])
    max_tokens = output_tokens(prompt_tokens=prompt_tokens, max_tokens=ask.sampling.max_tokens, limits=limits)
    largest = int(ask.prompt_T.max())
    if largest >= limits.vocab_size:
        raise InvalidRequestError(f"token id {largest} is outside the vocabulary of {limits.vocab_size}")
    if ask.num_sent_tokens > prompt_tokens:
        raise InvalidRequestError(f"{ask.num_sent_tokens} sent tokens in a prompt of {prompt_tokens}")
    window = limits.cache_window_tokens
    # Without a seed all tenants' blocks would have the same names.
    if not ask.prefix_seed or (window is not None and prompt_tokens + max_tokens > window):
        return Demand(prompt_tokens, max_tokens, None, ask.sampling.prompt_logprobs)
    hashes = await hash_on_loop.chain(ask.prefix_seed, ask.prompt_T, block_tokens=layout.block_tokens)
    return Demand(prompt_tokens, max_tokens, hashes, ask.sampling.prompt_logprobs)


def output_tokens(*, prompt_tokens: int, max_tokens: int, limits: Limits) -> int:
    """Return how many tokens a request may generate; max_tokens = 0 asks for all that fit.

    Raises:
        InvalidRequestError: prompt and output are longer than the model allows, or the prompt is empty.
    """
    if prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty")
    room = limits.max_model_tokens - prompt_tokens
    if room < max(max_tokens, 1):
        raise InvalidRequestError(
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate are over the limit of "
            f"{limits.max_model_tokens} tokens"
        )
    return max_tokens or room
