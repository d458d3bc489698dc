from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kvcache.allocator import PageAllocator, pages_of
from kvrelay.kvcache.block_table import BlockTable


def test_a_position_is_found_in_its_page_and_row() -> None:
    table = BlockTable(64, [7, 3])
    table.append([9])
    assert [table.page_of(position) for position in (0, 63, 64, 128)] == [7, 7, 3, 9]
    assert table.slot_of(65) == 3 * 64 + 1
    assert table.capacity_tokens == 192


def test_a_position_behind_the_last_page_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="position 128"):
        BlockTable(64, [7, 3]).page_of(128)


def test_the_pages_of_a_prefix_include_the_one_it_ends_in() -> None:
    table = BlockTable(4, [5, 6, 7])
    assert [table.pages_for(tokens) for tokens in (0, 1, 4, 5, 12)] == [(), (5,), (5,), (5, 6), (5, 6, 7)]


@given(st.sets(st.integers(0, 19)), st.lists(st.integers(0, 19), max_size=20))
def test_a_shared_page_is_copied_once_and_never_written(shared: set[int], writes: list[int]) -> None:
    pages = PageAllocator(20)
    table = BlockTable(4, pages_of(pages.allocate(5)))
    original = table.pages
    pages.retain({table.page_of(position) for position in shared})
    others = {table.page_of(position) for position in shared}

    for position in writes:
        copy = table.writable(position, pages.refcount, lambda: pages_of(pages.allocate(1))[0])
        if copy is not None:
            old, new = copy
            assert old in others
            pages.release([old])
            assert table.page_of(position) == new
        assert table.page_of(position) not in others
        assert table.writable(position, pages.refcount, lambda: -1) is None

    written = {position // 4 for position in writes}
    assert all(page == old for index, (page, old) in enumerate(zip(table.pages, original, strict=True))
               if index not in written)  # fmt: skip
    pages.check()
