"""Which pages of an epoch a quarantine costs."""

from __future__ import annotations

from kvrelay.core.layout import PageLayout
from kvrelay.decode_node.admission import PageBook
from kvrelay.decode_node.held_pages import HeldPages

LAYOUT = PageLayout(num_layers=1, latent_width=8, rope_width=8, dtype="float32", model_id="m")


def test_a_quarantine_costs_only_pages_that_a_late_write_can_reach_and_ends_whole() -> None:
    book = PageBook(num_pages=20, page_tokens=64, block_tokens=64)
    other = book.reserve(prompt_tokens=64, max_tokens=1, hashes=[b"a"])
    book.cache_blocks([b"a"], other.pages)
    book.release(other.pages)
    held = HeldPages(book, LAYOUT)
    grant = book.reserve(prompt_tokens=200, max_tokens=300, hashes=[b"a"])  # 1 resident page, 3 to write, 4 of output
    held.hold(1, grant, prompt_tokens=200)

    held.quarantine(1)
    during = book.account()
    assert not held.waits_for_writers
    held.free(1, grant.pages[:4])
    after = book.account()

    assert (during.quarantined, during.pinned, during.cached, during.free) == (3, 0, 1, 16)
    assert (after.quarantined, after.pinned, after.cached, after.free) == (0, 0, 1, 19)
    book.check()
