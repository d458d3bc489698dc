"""Scattered pages into one contiguous buffer and back: what the relay sends in large pieces.

Shapes in this file: L layers, P pages of the pool, G pages packed, Z words of a page in one layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 1024  # of 8 bytes


def pack_pages(pool: Tensor, pages_G: Tensor, packed: Tensor) -> None:
    """Copy pages of all layers into `packed` [L, G, page]; one launch, capturable.

    Args:
        pool: [L, P, page ...], contiguous; a page of a layer is a whole number of 8-byte words.
        pages_G: int64 on the pool's device; indices are not checked.
        packed: [L, G, page ...], contiguous, of the pool's dtype.
    """
    _move(pool, pages_G, packed, unpack=False)


def unpack_pages(pool: Tensor, pages_G: Tensor, packed: Tensor) -> None:
    """Copy `packed` to pages of all layers; contract of `pack_pages` the other way. Pages have no duplicates."""
    _move(pool, pages_G, packed, unpack=True)


def _move(pool: Tensor, pages_G: Tensor, packed: Tensor, *, unpack: bool) -> None:
    num_layers, num_pages = pool.shape[:2]
    assert packed.shape == (num_layers, len(pages_G), *pool.shape[2:]), "the buffer holds these pages of every layer"
    pool_words = _words(pool).view(num_layers, num_pages, -1)
    packed_words = _words(packed).view(num_layers, len(pages_G), -1)
    if packed_words.numel() == 0:
        return
    page_words = pool_words.shape[2]
    _copy_pages[(triton.cdiv(page_words, BLOCK_WORDS), len(pages_G), num_layers)](
        pool_words, packed_words, pages_G, num_pages, len(pages_G), page_words, BLOCK=BLOCK_WORDS, UNPACK=unpack
    )


def _words(pages: Tensor) -> Tensor:
    assert pages.is_contiguous(), "pages are copied as words of one piece of memory"
    return pages.view(-1).view(torch.int64)


@triton.jit
def _copy_pages(
    pool_ptr,
    packed_ptr,
    pages_ptr,
    num_pages,
    num_packed,
    page_words,
    BLOCK: tl.constexpr,
    UNPACK: tl.constexpr,
):
    number = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    page = tl.load(pages_ptr + number)
    word_Z = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_Z = word_Z < page_words
    pool_Z = pool_ptr + (layer * num_pages + page) * page_words + word_Z
    packed_Z = packed_ptr + (layer * num_packed + number) * page_words + word_Z
    if UNPACK:
        tl.store(pool_Z, tl.load(packed_Z, inside_Z, other=0), inside_Z)
    else:
        tl.store(packed_Z, tl.load(pool_Z, inside_Z, other=0), inside_Z)
