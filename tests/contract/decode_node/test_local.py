"""A decode node that has nearly all of a prompt computes the rest itself, and nobody can tell by the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from decode_lab import GREEDY, LONG, ORACLE, Lab, read, refused, running, running_stream
from kvrelay.core.types import Sampling
from kvrelay.model.transformer import Model
from kvrelay.proto.v1 import common_pb2, decode_pb2
from oracle_data import recording

LOCAL_TOKENS = 200


@pytest.fixture
async def lab(model: Model, index_url: str) -> AsyncIterator[Lab]:
    async with running(model, index_url, local_prefill_tokens=LOCAL_TOKENS) as made:
        yield made


async def ask(lab: Lab, prompt: Sequence[int], sampling: Sampling, **changed: Any) -> decode_pb2.ReserveReply:
    request = lab.request(prompt, sampling, **{"may_compute": True, **changed})
    reply: decode_pb2.ReserveReply = await lab.stub.Reserve(request)
    return reply


def alone(lab: Lab, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    return [one.token_id for one in lab.prefill.engine.generate(list(prompt), sampling)]


async def tokens_of(lab: Lab, reply: decode_pb2.ReserveReply) -> tuple[list[int], list[decode_pb2.DecodeEvent]]:
    events = [event async for event in lab.decode(reply.ticket)]
    first = [event.first.token.token_id for event in events if event.HasField("first")]
    return first + [token.token_id for event in events for token in event.tokens.tokens], events


async def test_the_next_turn_of_a_chat_is_computed_here_from_prompt_and_answer(lab: Lab) -> None:
    turn = recording(ORACLE, 333).prompt
    first = await lab.generate(turn, Sampling(max_tokens=100))
    again = [*turn, *first.token_ids, *recording(ORACLE, 64).prompt]

    reply = await ask(lab, again, GREEDY)
    tokens, events = await tokens_of(lab, reply)

    assert reply.computes
    assert tokens == alone(lab, again, GREEDY)
    assert events[0].admitted.resident_tokens == 384  # whole blocks of the first prompt and of its answer
    assert events[1].first.computed_tokens == len(again) - 384
    assert events[1].first.prefill_ms > 0
    assert events[-1].done.num_tokens == 23
    stats = await lab.settled()
    assert stats.counters["local_prefill_tokens"] == len(again) - 384
    longer = [*again, *tokens, 5, 6, 7]  # what was computed here is resident for the turn after it
    tokens, events = await tokens_of(lab, await ask(lab, longer, GREEDY))
    assert events[0].admitted.resident_tokens == (len(longer) - 4) // 64 * 64
    assert tokens == alone(lab, longer, GREEDY)
    await lab.settled()


async def test_others_go_on_while_a_prompt_is_computed_and_all_get_their_own_tokens(lab: Lab) -> None:
    shared = recording(ORACLE, 1500).prompt
    await lab.generate(shared, GREEDY)
    _, call = await running_stream(lab, recording(ORACLE, 7).prompt)
    prompts = [[*shared, *recording(ORACLE, 64).prompt[at:]] for at in (0, 30)]

    replies = [await ask(lab, prompt, GREEDY) for prompt in prompts]
    answers = await asyncio.gather(*(tokens_of(lab, reply) for reply in replies))

    assert all(reply.computes for reply in replies)
    assert [tokens for tokens, _ in answers] == [alone(lab, prompt, GREEDY) for prompt in prompts]
    call.cancel()
    await lab.settled()


@pytest.mark.parametrize("case", ["too much is missing", "prompt logprobs", "not asked"])
async def test_the_rest_is_handed_over(lab: Lab, case: str) -> None:
    prompt = recording(ORACLE, 333).prompt
    if case != "too much is missing":
        await lab.generate(prompt, GREEDY)
    sampling = Sampling(max_tokens=24, prompt_logprobs=case == "prompt logprobs")
    reply = await ask(lab, prompt, sampling, **({"may_compute": False} if case == "not asked" else {}))

    assert not reply.computes
    stream = asyncio.create_task(read(lab.decode(reply.ticket)))
    session, first = lab.prefill.prefill(prompt, GREEDY)
    await lab.prefill.hand_over(reply.ticket, session, first)
    assert [first.token_id, *(await stream).token_ids] == recording(ORACLE, 333).greedy
    await lab.settled()


async def test_a_prompt_that_is_here_as_a_whole_computes_its_last_block_into_pages_of_its_own(lab: Lab) -> None:
    wanted = recording(ORACLE, 64)
    await lab.generate(wanted.prompt, GREEDY)

    # One block, all of it cached: there is nothing before its last token that is a whole block.
    tokens, events = await tokens_of(lab, await ask(lab, wanted.prompt, GREEDY))

    assert events[0].admitted.resident_tokens == 0
    assert tokens == wanted.greedy
    await lab.settled()


@pytest.mark.parametrize("ends", ["stop", "length"])
async def test_a_first_token_that_ends_the_request_ends_it(lab: Lab, ends: str) -> None:
    wanted = recording(ORACLE, 64)
    stop = (wanted.greedy[0],) if ends == "stop" else ()
    sampling = Sampling(max_tokens=24 if stop else 1, stop_token_ids=stop)

    tokens, events = await tokens_of(lab, await ask(lab, wanted.prompt, sampling))

    assert tokens == wanted.greedy[:1]
    assert events[-1].done.num_tokens == 0
    await lab.settled()


async def test_nobody_may_write_what_is_computed_here(lab: Lab) -> None:
    prompt = recording(ORACLE, 64).prompt
    reply = await ask(lab, prompt, LONG)
    session, first = lab.prefill.prefill(prompt, LONG)

    (outcome,) = await lab.prefill.hand_over(reply.ticket, session, first)

    assert "not legal" in str(outcome)
    await lab.stub.Abort(common_pb2.AbortRequest(request=reply.ticket.request, reason="enough"))
    await lab.settled()


async def test_an_abort_at_any_moment_leaves_nothing_behind(lab: Lab) -> None:
    shared = recording(ORACLE, 1500).prompt
    await lab.generate(shared, GREEDY)
    for pause_s in (0.0, 0.002, 0.01, 0.05):
        reply = await ask(lab, [*shared, *recording(ORACLE, 64).prompt], LONG)
        assert reply.computes
        stream = asyncio.create_task(refused(read(lab.decode(reply.ticket))))
        await asyncio.sleep(pause_s)
        await lab.stub.Abort(common_pb2.AbortRequest(request=reply.ticket.request, reason="enough"))
        assert (await stream).code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.FAILED_PRECONDITION)
        await lab.settled()


async def test_a_holder_that_falls_silent_ends_what_is_computed_for_it(model: Model, index_url: str) -> None:
    async with running(model, index_url, local_prefill_tokens=LOCAL_TOKENS, lease_s=0.5) as lab:
        await ask(lab, recording(ORACLE, 64).prompt, LONG)  # and nobody ever reads its stream
        await lab.settled()
