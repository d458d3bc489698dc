"""The latent pool and the checksums over it."""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import replace

import pytest
import torch
import xxhash

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.layout import PageLayout
from kvrelay.kernels import checksum, quant
from kvrelay.kv_transfer import pool_agent
from kvrelay.kv_transfer.values import ChecksumKind
from kvrelay.kvcache.checksum import checksum_ranges
from kvrelay.kvcache.pool import LatentPool

LAYOUT = PageLayout(
    num_layers=3, latent_width=6, rope_width=2, dtype="float32", model_id="m", page_tokens=4, block_tokens=8
)
CPU = torch.device("cpu")


def a_pool(num_pages: int = 5, dtype: str = "float32") -> LatentPool:
    layout = PageLayout(
        num_layers=3, latent_width=6, rope_width=2, dtype=dtype, model_id="m", page_tokens=4, block_tokens=8
    )
    return LatentPool(layout, num_pages, CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_written_are_read_back_from_their_slots(dtype: str) -> None:
    pool = a_pool(dtype=dtype)
    slots = torch.tensor([17, 0, 5])
    rows = torch.randn(3, 8).to(pool.layer(0).dtype)

    pool.write(1, slots, rows)

    assert torch.equal(pool.read(1, slots), rows)
    assert torch.equal(pool.layer(1)[4, 1], rows[0])  # slot 17 = page 4, row 1
    assert not pool.layer(0).any()
    assert not pool.layer(2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_of_fp8_reads_what_its_bytes_stand_for(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    layout = PageLayout(
        num_layers=2, latent_width=256, rope_width=32, dtype=name, model_id="m", latent_format="fp8", block_tokens=64
    )
    pool, rows = LatentPool(layout, 3, CPU), torch.randn(70, 288).to(dtype)
    slots = torch.randperm(3 * 64)[:70]

    pool.write(1, slots, rows)

    stored = quant.quantise(rows, latent_width=256)
    assert torch.equal(pool.read_stored(1, slots), stored)
    assert torch.equal(pool.rows(1)[slots], stored)
    found = pool.read(1, slots)
    assert found.dtype == dtype
    assert torch.equal(found, pool.computed(pool.stored(rows)))
    assert torch.equal(found, pool.computed(pool.stored(found))), "stored again it is the same"
    bound = torch.maximum(rows.float().abs() / 16, rows.float().abs().max() / 2**17)
    assert ((found - rows).float().abs() <= bound).all()
    assert not pool.layer(0).any()


@pytest.mark.parametrize("latent_format", ["model", "fp8"])
def test_no_rows_are_no_rows_in_any_format(latent_format: str) -> None:
    layout = PageLayout(
        num_layers=1, latent_width=8, rope_width=4, dtype="float32", model_id="m", latent_format=latent_format
    )
    pool, none = LatentPool(layout, 1, CPU), torch.empty(0, dtype=torch.int64)

    pool.write(0, none, torch.empty(0, 12))

    assert pool.read(0, none).shape == (0, 12)


def test_not_a_number_stays_one_in_a_pool_of_fp8() -> None:
    layout = PageLayout(num_layers=1, latent_width=8, rope_width=4, dtype="float32", model_id="m", latent_format="fp8")
    pool, rows = LatentPool(layout, 1, CPU), torch.ones(2, 12)
    rows[0, 3] = torch.nan

    pool.write(0, torch.tensor([4, 5]), rows)

    assert pool.read(0, torch.tensor([4, 5])).isnan().any(1).tolist() == [True, False]


def test_a_row_lies_where_the_layout_says() -> None:
    pool = a_pool()
    row = torch.arange(8, dtype=torch.float32)
    pool.write(2, torch.tensor([3 * 4 + 2]), row[None])

    offset = LAYOUT.offset_bytes(layer=2, page=3, row=2, num_pages=pool.num_pages)

    assert bytes(pool.memory()[offset : offset + LAYOUT.row_bytes]) == row.numpy().tobytes()


def test_the_pool_is_one_page_aligned_allocation_of_zeros() -> None:
    pool = a_pool()

    assert pool.address % mmap.PAGESIZE == 0
    assert pool.num_bytes == 5 * LAYOUT.page_bytes_all_layers == len(pool.memory())
    assert pool.layer(2).data_ptr() == pool.address + 2 * 5 * LAYOUT.page_bytes
    assert not any(pool.memory())


def test_bytes_put_into_the_memory_are_seen_as_rows() -> None:
    pool = a_pool()
    row = torch.full((8,), 2.5)
    offset = LAYOUT.offset_bytes(layer=0, page=1, row=3, num_pages=5)

    pool.memory()[offset : offset + LAYOUT.row_bytes] = row.numpy().tobytes()

    assert torch.equal(pool.read(0, torch.tensor([7]))[0], row)


def test_the_checksum_is_xxh3_64_over_the_pieces_in_order() -> None:
    memory = memoryview(bytes(range(256)) * 4)

    assert checksum_ranges(memory, [(100, 50), (7, 3)]) == xxhash.xxh3_64_intdigest(
        memory[100:150].tobytes() + memory[7:10].tobytes()
    )
    assert checksum_ranges(memory, [(0, 20), (20, 30)]) == checksum_ranges(memory, [(0, 50)])
    assert checksum_ranges(memory, [(0, 20), (20, 30)]) != checksum_ranges(memory, [(20, 30), (0, 20)])


def test_a_host_pool_gives_the_checksums_of_hosts_and_of_gpus() -> None:
    pool = a_pool()
    pool.layer(1).normal_()
    ranges = [(200, 64), (0, 8)]
    summed = pool_agent.local_pool(pool).summing(ChecksumKind.WORDS)

    assert pool_agent.local_pool(pool).kind is ChecksumKind.XXH3
    assert pool_agent.local_pool(pool).checksum(ranges) == checksum_ranges(pool.memory(), ranges)
    copy = pool.memory()[200:264].tobytes() + pool.memory()[0:8].tobytes()
    assert summed.checksum(ranges) == checksum.checksum_bytes(memoryview(copy))
    with pytest.raises(InvalidRequestError, match="this pool has none"):
        replace(summed, others=()).summing(ChecksumKind.XXH3)


def test_staging_lies_behind_the_pages_of_one_region() -> None:
    pool = LatentPool(LAYOUT, 5, CPU, staging_bytes=4096)

    pool.words()[-1] = -1

    assert pool.region_bytes == pool.num_bytes + 4096 == 8 * len(pool.words())
    assert not any(pool.memory())
    assert len(pool.memory()) == pool.num_bytes


def test_one_changed_bit_changes_the_checksum() -> None:
    pool = a_pool()
    before = checksum_ranges(pool.memory(), [(0, pool.num_bytes)])

    pool.memory()[77] ^= 1

    assert checksum_ranges(pool.memory(), [(0, pool.num_bytes)]) != before


def test_the_pool_outlives_its_views() -> None:
    view = a_pool().layer(0)  # the pool object itself is gone

    view.fill_(1.0)
    assert view.sum() == view.numel()


def longest_gap_of_another_thread(memory: memoryview) -> float:
    """Return for how long another thread stood still during a checksum, as a share of its time."""
    longest_s = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal longest_s
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            longest_s = max(longest_s, now - last)
            last = now
            time.sleep(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    checksum_ranges(memory, [(0, len(memory))])
    took_s = time.perf_counter() - started
    done.set()
    watcher.join()
    return longest_s / took_s


def test_a_checksum_does_not_hold_the_interpreter_lock() -> None:
    memory = memoryview(bytearray(256 << 20))

    # Other work on the machine may stop the thread as well, but not each time; with the lock held it would stand still.
    assert any(longest_gap_of_another_thread(memory) < 0.5 for _ in range(10))


def test_a_thread_takes_the_device_of_the_pool_it_computes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    pool = a_pool()

    pool.bind_thread()
    pool.device = torch.device("cuda", 1)
    pool.bind_thread()

    assert taken == [torch.device("cuda", 1)]
