"""Prompts that a decode node completes itself hold the others up no longer than they may."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.types import Epoch, Incarnation, Sampling
from kvrelay.decode_node.admission import PageBook
from kvrelay.decode_node.intake import Demand
from kvrelay.decode_node.local_prefill import LEAST_TOKENS, Chunk, LocalPrompts, Prompt
from kvrelay.decode_node.local_work import LocalWork
from kvrelay.decode_node.records import Records
from kvrelay.decode_node.requests import Ask, Record
from kvrelay.decode_node.scheduler import Sequence
from kvrelay.kv_transfer.values import Request

PAUSE_S = 0.025


def a_prompt(key: int = 1, *, prompt_tokens: int = 2000, resident: int = 1800) -> Prompt:
    sequence = Sequence(key, prompt_tokens - 1, 0, 10, frozenset())
    return Prompt(sequence, np.arange(prompt_tokens, dtype=np.int32), resident)


def waiting(*prompts: Prompt) -> LocalPrompts:
    local = LocalPrompts(pause_s=PAUSE_S)
    for prompt in prompts:
        local.add(prompt)
    return local


@given(start_s=st.floats(0, 0.02), token_s=st.floats(1e-6, 1e-3))
def test_between_two_steps_of_the_others_lies_at_most_the_pause(start_s: float, token_s: float) -> None:
    local, chunks = waiting(a_prompt(), a_prompt(2)), []
    shortest_s = start_s + LEAST_TOKENS * token_s  # nobody can make less of a pause with this device
    while (chunk := local.next_chunk(alone=False)) is not None:
        took_s = start_s + chunk.tokens.num_tokens * token_s
        assert took_s <= max(PAUSE_S, shortest_s) * (1 + 1e-9)
        local.ran(chunk, took_s)
        chunks.append(chunk)

    assert [position for one in chunks for position in one.ids_T.tolist()] == [*range(1800, 2000)] * 2


def test_a_fast_device_computes_more_at_once_after_the_first_chunk() -> None:
    local, lengths = waiting(a_prompt(resident=0)), []
    while (chunk := local.next_chunk(alone=False)) is not None:
        lengths.append(chunk.tokens.num_tokens)
        local.ran(chunk, 0.001 + 1e-5 * chunk.tokens.num_tokens)

    assert lengths[0] == LEAST_TOKENS
    assert max(lengths) > 20 * LEAST_TOKENS


def test_alone_on_the_node_a_prompt_is_completed_at_once() -> None:
    prompt = a_prompt()
    local = waiting(prompt)

    chunk = local.next_chunk(alone=True)

    assert chunk is not None
    assert (chunk.tokens.num_tokens, chunk.is_last) == (200, True)
    assert local.ran(chunk, 1.0) is prompt.sequence
    assert local.next_chunk(alone=True) is None


def test_a_prompt_that_leaves_half_way_lets_the_next_one_begin() -> None:
    local = waiting(a_prompt(1), a_prompt(2))
    first = local.next_chunk(alone=False)
    assert isinstance(first, Chunk)
    assert local.ran(first, 0.001) is None

    local.leave(1)
    local.leave(7)  # unknown

    second = local.next_chunk(alone=False)
    assert second is not None
    assert (second.key, second.tokens.start) == (2, 1800)


def waiting_record(computes: int) -> Record:
    node = Incarnation("decode", 1)
    prompt_T = np.zeros(500, dtype=np.int32)
    ask = Ask(Request("r", 1), node, node, node, 1, prompt_T, 0, Sampling(max_tokens=4), b"", b"seed", 1.0)
    return Record(Epoch(node, 1), ask, 4, (), 0, [], deadline_s=1.0, renewed_s=0.0, computes=computes)


@pytest.mark.parametrize(
    ("limit", "waits", "taken"), [(200, 0, True), (200, 99, True), (200, 100, False), (0, 0, False)]
)
def test_all_that_waits_to_be_computed_here_is_bounded_together(limit: int, waits: int, taken: bool) -> None:
    book, records = PageBook(num_pages=20, page_tokens=64, block_tokens=64), Records()
    hashes = [bytes([at]) * 16 for at in range(7)]
    grant = book.reserve(prompt_tokens=384, max_tokens=1, hashes=())
    book.cache_blocks(hashes[:6], grant.pages)
    record = waiting_record(waits)
    records.add(record)
    demand = Demand(485, 4, hashes)  # 384 of them are here

    assert LocalWork(limit, 64).takes(demand, book=book, records=records) == taken
    record.output.append(1)  # computed
    assert LocalWork(limit, 64).takes(demand, book=book, records=records) == (limit > 0)
