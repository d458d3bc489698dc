"""A decode node takes real latents over NIXL and answers with the tokens of the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from decode_lab import (
    BLOCK_TOKENS,
    CPU,
    GREEDY,
    ORACLE,
    Lab,
    read,
    running,
)
from kvrelay.core import prefix_hash
from kvrelay.core.types import FinishReason, SampledToken, Sampling
from kvrelay.index.reader import PrefixReader
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2
from oracle_data import LENGTHS, MAX_MODEL_LEN, oracle_folder, recording


@pytest.mark.parametrize("length", LENGTHS)
async def test_the_streamed_tokens_are_the_recorded_ones(lab: Lab, length: int) -> None:
    wanted = recording(ORACLE, length)
    seen = await lab.generate(wanted.prompt, GREEDY)
    assert seen.token_ids == wanted.greedy
    assert seen.reason is FinishReason.LENGTH
    assert seen.done is not None
    assert seen.done.num_tokens == 23
    assert seen.done.step_ms > 0
    (admitted,) = seen.admitted
    assert admitted.relayed_bytes == length * lab.prefill.pool.layout.row_bytes * lab.prefill.pool.layout.num_layers
    assert min(admitted.exposed_relay_ms, admitted.verify_ms, admitted.admit_ms) >= 0
    stats = await lab.settled()
    assert stats.counters["tokens"] == 23
    assert stats.counters["steps"] == stats.counters["steps_batch_1"] == 23


async def test_a_ring_of_writers_gives_the_same_tokens(model: Model, index_url: str) -> None:
    async with running(model, index_url, ring_size=3) as lab:
        wanted = recording(ORACLE, 1500)
        assert (await lab.generate(wanted.prompt, GREEDY)).token_ids == wanted.greedy
        await lab.settled()


async def test_eight_requests_at_once_get_the_tokens_they_get_alone(lab: Lab) -> None:
    wanted = [recording(ORACLE, length) for length in (1, 7, 64, 333, 1500, 7, 333, 64)]
    ready = [lab.prefill.prefill(one.prompt, GREEDY) for one in wanted]
    tickets = [await lab.reserve(one.prompt, GREEDY) for one in wanted]
    streams = [asyncio.create_task(read(lab.decode(ticket))) for ticket in tickets]
    await asyncio.gather(*(lab.prefill.hand_over(ticket, *one) for ticket, one in zip(tickets, ready, strict=True)))
    for one, (_, first), seen in zip(wanted, ready, await asyncio.gather(*streams), strict=True):
        assert [first.token_id, *seen.token_ids] == one.greedy
    assert any(name.startswith("steps_batch_8") for name in (await lab.settled()).counters)


async def test_a_stop_id_ends_the_request(lab: Lab) -> None:
    wanted = recording(ORACLE, 64)
    stop = wanted.greedy[5]
    seen = await lab.generate(wanted.prompt, Sampling(max_tokens=24, stop_token_ids=(stop,)))
    assert seen.token_ids == wanted.greedy[: wanted.greedy.index(stop) + 1]
    assert seen.reason is FinishReason.STOP
    await lab.settled()


async def test_a_request_that_its_first_token_ends_generates_nothing_here(lab: Lab) -> None:
    wanted = recording(ORACLE, 64)
    seen = await lab.generate(wanted.prompt, Sampling(max_tokens=24, stop_token_ids=(wanted.greedy[0],)))
    assert (seen.token_ids, seen.reason) == (wanted.greedy[:1], FinishReason.STOP)
    seen = await lab.generate(wanted.prompt, Sampling(max_tokens=1))
    assert (seen.token_ids, seen.reason) == (wanted.greedy[:1], FinishReason.LENGTH)
    await lab.settled()


async def test_sampling_and_logprobs_follow_the_request(lab: Lab) -> None:
    prompt = recording(ORACLE, 64).prompt
    sampling = Sampling(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, repetition_penalty=1.2, logprobs=3)
    wanted = list(lab.prefill.engine.generate(prompt, sampling))
    ticket = await lab.reserve(prompt, sampling)
    call = lab.decode(ticket)
    await lab.prefill.hand_over(ticket, *lab.prefill.prefill(prompt, sampling))
    tokens = [token async for event in call for token in event.tokens.tokens]
    assert [token.token_id for token in tokens] == [one.token_id for one in wanted[1:]]
    assert wanted[1].logprob is not None
    assert tokens[0].logprob.logprob == pytest.approx(wanted[1].logprob.logprob, abs=1e-3)
    assert len(tokens[0].logprob.top) == 3


async def test_whole_blocks_of_an_earlier_prompt_are_not_relayed_again(lab: Lab) -> None:
    wanted = recording(ORACLE, 333)
    await lab.generate(wanted.prompt, GREEDY)
    ticket = await lab.reserve(wanted.prompt, GREEDY)
    assert ticket.resident_tokens == 320
    stream = asyncio.create_task(read(lab.decode(ticket)))
    await lab.prefill.hand_over(ticket, *lab.prefill.prefill(wanted.prompt, GREEDY))
    seen = await stream
    assert seen.token_ids == wanted.greedy[1:]
    layout = lab.prefill.pool.layout
    assert seen.admitted[0].resident_tokens == 320
    assert seen.admitted[0].relayed_bytes == 13 * layout.row_bytes * layout.num_layers
    await lab.settled()


async def test_a_prompt_that_is_resident_as_a_whole_is_admitted_without_a_byte(lab: Lab) -> None:
    wanted = recording(ORACLE, 64)
    await lab.generate(wanted.prompt, GREEDY)
    seen = await lab.generate(wanted.prompt, GREEDY)
    assert seen.token_ids == wanted.greedy
    assert (seen.admitted[0].resident_tokens, seen.admitted[0].relayed_bytes) == (64, 0)
    await lab.settled()


async def test_blocks_of_the_output_are_resident_for_the_next_turn(lab: Lab) -> None:
    prompt, sampling = recording(ORACLE, 333).prompt, Sampling(max_tokens=100)
    first_turn = await lab.generate(prompt, sampling)
    # 333 + 99 rows are written: the last token was never fed back.
    longer = [*prompt, *first_turn.token_ids, 5, 6, 7]
    ticket = await lab.reserve(longer, GREEDY)
    assert ticket.resident_tokens == 432 // BLOCK_TOKENS * BLOCK_TOKENS
    wanted = [token.token_id for token in lab.prefill.engine.generate(longer, GREEDY)]
    stream = asyncio.create_task(read(lab.decode(ticket)))
    await lab.prefill.hand_over(ticket, *lab.prefill.prefill(longer, GREEDY))
    assert (await stream).token_ids == wanted[1:]


async def test_the_index_knows_the_blocks_that_are_here_and_forgets_evicted_ones(model: Model, index_url: str) -> None:
    async with running(model, index_url, num_pages=12, fleet="small") as lab:
        prompt = recording(ORACLE, 333).prompt
        hashes = prefix_hash.chain(lab.seed, torch.tensor(prompt, dtype=torch.int32).numpy(), block_tokens=BLOCK_TOKENS)
        reader = PrefixReader(index_url, "small")

        async def blocks_here() -> int:
            held = (await reader.longest(hashes)).holdings
            return next((one.num_blocks for one in held if one.node == lab.server.node.incarnation), 0)

        async def becomes(number: int) -> None:
            async with asyncio.timeout(20):
                while await blocks_here() != number:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        await lab.generate(prompt, GREEDY)
        await becomes(5)
        await lab.reserve(list(range(100)) * 6, Sampling(max_tokens=10))  # 10 of 12 pages
        await becomes(2)
        await reader.close()


async def test_dynamic_ntk_beyond_its_window_neither_uses_nor_fills_the_cache(index_url: str) -> None:
    name = "v3_dynamic_ntk"
    model = load_model(oracle_folder(name), dtype="float32", device=CPU, max_model_len=MAX_MODEL_LEN)
    async with running(model, index_url) as lab:
        wanted = recording(name, 333)
        for _ in range(2):
            seen = await lab.generate(wanted.prompt, GREEDY)
            assert seen.token_ids == wanted.greedy
            assert seen.admitted[0].resident_tokens == 0
        assert (await lab.settled()).cached_pages == 0


async def test_the_last_token_leaves_before_the_blocks_of_its_request_are_cached(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    cache_blocks, sampled_to_pb = lab.server.node.book.cache_blocks, convert.sampled_to_pb

    def cached(hashes: Sequence[bytes], pages: Sequence[int]) -> list[bytes]:
        happened.append("cached")
        return cache_blocks(hashes, pages)

    def told(token: SampledToken) -> common_pb2.SampledToken:
        happened.append("told")
        return sampled_to_pb(token)

    monkeypatch.setattr(lab.server.node.book, "cache_blocks", cached)
    monkeypatch.setattr(convert, "sampled_to_pb", told)
    wanted = recording(ORACLE, 333)
    seen = await lab.generate(wanted.prompt, Sampling(max_tokens=2))

    assert seen.token_ids == wanted.greedy[:2]
    assert happened[-2:] == ["told", "cached"]
    assert (await lab.settled()).cached_pages == 5
