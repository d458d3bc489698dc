from __future__ import annotations

import pytest

from kvrelay.core.errors import SettingsError
from kvrelay.core.layout import PageLayout
from kvrelay.kvcache.sizing import pool_pages

LAYOUT = PageLayout(num_layers=2, latent_width=6, rope_width=2, dtype="float32", model_id="m", block_tokens=64)
PAGE_BYTES = 2 * 64 * 8 * 4


def sized(*, pages: int = 0, mib: int = 0, free_bytes: int = 1 << 40, on_gpu: bool = False) -> int:
    return pool_pages(LAYOUT, pages=pages, mib=mib, free_bytes=free_bytes, longest_tokens=1000, on_gpu=on_gpu)


def test_a_number_of_pages_is_taken_as_it_is() -> None:
    assert sized(pages=7, free_bytes=0) == 7


def test_mebibytes_are_filled_with_whole_pages() -> None:
    assert sized(mib=3) == (3 << 20) // PAGE_BYTES


def test_a_cpu_node_takes_a_few_of_its_longest_requests_or_an_eighth_of_the_memory() -> None:
    assert sized() == 8 * 16
    assert sized(free_bytes=80 * PAGE_BYTES) == 10


def test_a_gpu_node_takes_most_of_the_memory() -> None:
    assert sized(free_bytes=1000 * PAGE_BYTES, on_gpu=True) == 850


def test_no_room_for_one_page_is_refused_with_the_bytes() -> None:
    with pytest.raises(SettingsError, match=f"needs {PAGE_BYTES} bytes, {PAGE_BYTES // 2} are there"):
        sized(free_bytes=4 * PAGE_BYTES)
