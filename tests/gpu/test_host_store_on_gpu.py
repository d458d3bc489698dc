"""Pages of a GPU go to locked host memory and come back, behind what was launched and beside what is launched later."""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters
from kvrelay.kvcache.host_store import HostStore
from kvrelay.kvcache.pool import LatentPool
from kvrelay.prefill_node.host_copier import HostCopier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LAYOUT = PageLayout(num_layers=5, latent_width=512, rope_width=64, dtype="bfloat16", model_id="m")
PAGES = 120
SLEEP_CYCLES = 2_000_000_000  # a second or so


@pytest.fixture
def pool() -> LatentPool:
    made = LatentPool(LAYOUT, PAGES, torch.device("cuda", 0))
    for layer in range(LAYOUT.num_layers):
        made.layer(layer).normal_()
    return made


def whole(pool: LatentPool) -> torch.Tensor:
    return torch.stack([pool.layer(layer) for layer in range(LAYOUT.num_layers)]).cpu()


def ended(copier: HostCopier, copy_id: int) -> None:
    until_s = time.monotonic() + 20
    while copy_id not in copier.take_done():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_pages_come_back_as_they_were_and_the_memory_is_locked(pool: LatentPool) -> None:
    store = HostStore(pool, 90)
    assert store._rows.is_pinned()
    before = whole(pool)
    rng = random.Random(3)
    out, kept, back = list(range(0, PAGES, 2)), rng.sample(range(90), 60), rng.sample(range(1, PAGES, 2), 60)
    store.save(out, kept, store.launched())
    store.load(kept, back, store.launched())

    after = whole(pool)
    assert torch.equal(after[:, back], before[:, out])
    assert torch.equal(after[:, out], before[:, out])
    store.close()


def test_a_copy_waits_for_what_was_launched_and_nobody_waits_for_it(pool: LatentPool) -> None:
    copier = HostCopier(HostStore(pool, 10), counters=Counters(), wake=lambda: None)
    copier.begin(1, [0], [0], to_host=True)  # what is made at the first copy is no matter here
    ended(copier, 1)
    torch.cuda.synchronize()
    expected = torch.full((64, 576), 7.0, dtype=torch.bfloat16)

    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    for layer in range(LAYOUT.num_layers):
        pool.layer(layer)[3].fill_(7.0)
    began_s = time.monotonic()
    copier.begin(2, [3], [4], to_host=True)
    assert time.monotonic() - began_s < 0.05
    assert copier.take_done() == []
    ended(copier, 2)

    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    read = pool.layer(2)[5].clone()  # launched before the load, so it sees what was there before
    was = pool.layer(2)[6].clone()
    copier.begin(3, [5], [4], to_host=False)
    ended(copier, 3)
    assert not torch.equal(read.cpu(), expected)
    assert torch.equal(pool.layer(2)[5].cpu(), expected)
    assert torch.equal(pool.layer(2)[6], was)
    copier.close()


def test_computing_goes_on_while_pages_are_copied(pool: LatentPool) -> None:
    copier = HostCopier(HostStore(pool, PAGES), counters=Counters(), wake=lambda: None)
    pages = list(range(PAGES))
    copier.begin(1, pages, pages, to_host=True)
    ended(copier, 1)
    factor = torch.ones(512, 512, device="cuda")
    _ = factor @ factor  # the first product loads a library, whatever is copied
    torch.cuda.synchronize()
    started, finished = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    for number in range(2, 12):
        copier.begin(number, pages, pages, to_host=number % 2 == 0)
    started.record()
    product = factor @ factor
    finished.record()
    finished.synchronize()
    assert float(product[0, 0]) == 512.0
    assert started.elapsed_time(finished) < 50.0
    copier.close()
