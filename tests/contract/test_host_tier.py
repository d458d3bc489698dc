"""Blocks that went to host memory and came back are the rows that were computed, on one rank and on two."""

from __future__ import annotations

import dataclasses
import random
import time

import numpy as np
import pytest
import torch

from contract.prefill_requests import MODEL, NEEDS_RECORDING
from contract.ring_ranks import Case, Outcome, alone, launch
from contract.test_ring import rows_of
from kvrelay.core.errors import CapacityError, SettingsError
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters
from kvrelay.kvcache.host_store import HostStore, host_pages
from kvrelay.kvcache.pool import LatentPool
from kvrelay.prefill_node.host_copier import HostCopier
from kvrelay.prefill_node.host_price import HOST_S_PER_GIB
from oracle_data import FOLDER

LAYOUT = PageLayout(num_layers=3, latent_width=8, rope_width=4, dtype="float32", model_id="m", block_tokens=64)
LENGTH = 1000
CACHED = 15 * 64
rng = random.Random(5)
PROMPTS = [tuple(rng.randrange(250) for _ in range(LENGTH)) for _ in range(4)]


def a_case(**changed: object) -> Case:
    case = Case(FOLDER / MODEL, PROMPTS[0], chunk_tokens=300, seed=b"s" * 16)
    return dataclasses.replace(case, **changed)  # type: ignore[arg-type]


def with_host(ring_size: int) -> Case:
    # Room for one prompt and a bit: each one drives out most of the one before.
    return a_case(before=tuple(PROMPTS), num_pages=20 if ring_size == 1 else 11, host_pages=64)


def same_rows(fresh: list[Outcome], again: list[Outcome]) -> None:
    before, after = rows_of(fresh, 0, LENGTH), rows_of(again, 0, LENGTH)
    assert np.array_equal(before[:, :CACHED], after[:, :CACHED])
    assert np.abs(before - after).max() < 1e-4  # the last tokens are in a chunk of their own this time
    assert fresh[0].token == again[0].token
    assert (fresh[0].cached_tokens, again[0].cached_tokens) == (0, CACHED)


@NEEDS_RECORDING
def test_rows_that_were_evicted_and_loaded_are_those_that_were_computed() -> None:
    fresh, again = alone(a_case()), alone(with_host(1))

    same_rows([fresh], [again])
    counted = again.counters
    assert counted["host_loads_total"] == 1
    assert counted["host_saved_total"] >= 40
    assert counted["prefill_tokens_executed"] == 4 * LENGTH + (LENGTH - CACHED)
    assert counted[HOST_S_PER_GIB] > 0


@NEEDS_RECORDING
def test_without_host_memory_the_same_prompts_are_computed_again() -> None:
    again = alone(dataclasses.replace(with_host(1), host_pages=0))

    assert again.cached_tokens < CACHED
    assert "host_loads_total" not in again.counters


@NEEDS_RECORDING
def test_each_rank_of_a_ring_loads_its_own_part() -> None:
    fresh, again = launch([a_case(), with_host(2)], ring_size=2)

    same_rows(fresh, again)
    loaded = [outcome.counters["host_loaded_bytes_total"] for outcome in again]
    assert all(loaded)
    assert again[0].counters["host_loads_total"] == 1


def filled_pool(num_pages: int) -> LatentPool:
    pool = LatentPool(LAYOUT, num_pages, torch.device("cpu"))
    for layer in range(LAYOUT.num_layers):
        pool.layer(layer).copy_(torch.randn(pool.layer(layer).shape))
    return pool


def test_pages_come_back_as_they_were_and_no_other_page_changes() -> None:
    pool = filled_pool(40)
    store = HostStore(pool, 50)
    before = torch.stack([pool.layer(layer).clone() for layer in range(3)])
    out, kept = list(range(0, 40, 2)), rng.sample(range(50), 20)
    store.save(out, kept, store.launched())
    assert torch.equal(torch.stack([pool.layer(layer) for layer in range(3)]), before)

    back = rng.sample(range(1, 40, 2), 20)
    store.load(kept, back, store.launched())
    after = torch.stack([pool.layer(layer) for layer in range(3)])

    assert torch.equal(after[:, back], before[:, out])
    assert torch.equal(after[:, out], before[:, out])


def test_a_copy_is_told_once_after_it_has_ended_and_closing_waits_for_all() -> None:
    pool = filled_pool(8)
    counters = Counters()
    woken: list[int] = []
    copier = HostCopier(HostStore(pool, 8), counters=counters, wake=lambda: woken.append(1))
    expected = pool.layer(1)[3].clone()
    copier.begin(7, [3], [0], to_host=True)
    until_s = time.monotonic() + 10
    while not (done := copier.take_done()) and time.monotonic() < until_s:
        time.sleep(0.001)
    assert done == [7]
    copier.begin(8, [5], [0], to_host=False)
    copier.close()

    assert copier.take_done() == [8]
    assert copier.take_done() == []
    assert len(woken) == 2
    assert torch.equal(pool.layer(1)[5], expected)
    page_bytes = LAYOUT.page_bytes_all_layers
    assert (counters.values["host_saved_bytes_total"], counters.values["host_loaded_bytes_total"]) == (page_bytes,) * 2


def test_one_copy_that_was_held_up_does_not_make_all_others_seem_slow() -> None:
    ends_s = [10 * number + (5.0 if number == 4 else 0.001) for number in range(6)]
    times = iter([at for number, end_s in enumerate(ends_s) for at in (10.0 * number, end_s)])
    counters = Counters()
    copier = HostCopier(HostStore(filled_pool(8), 8), counters=counters, wake=lambda: None, clock=lambda: next(times))
    for number in range(6):
        copier.begin(number, [1], [1], to_host=True)
    copier.close()

    assert counters.values[HOST_S_PER_GIB] == pytest.approx(0.001 / LAYOUT.page_bytes_all_layers * (1 << 30))


def test_memory_that_is_not_there_and_memory_for_nothing_are_refused() -> None:
    with pytest.raises(CapacityError, match="bytes of host memory wanted"):
        HostStore(filled_pool(1), 1 << 40)
    with pytest.raises(SettingsError, match="a page needs"):
        host_pages(LAYOUT, gib=1e-9)
    assert host_pages(LAYOUT, gib=0) == 0
