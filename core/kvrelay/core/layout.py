"""The bytes of a latent page, defined once for both pools, and the fingerprint that two nodes compare before they talk.

A pool is ONE allocation of `num_layers` slabs; a slab is `num_pages` pages; a page is `page_tokens` rows; a row is the
token's normalised latent (C numbers) followed by its rotated rope key (R numbers, half-split order). So pages that are
neighbours in a layer are neighbours in memory, and a run of pages is one contiguous piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What must be equal on writer and reader for a page to mean the same thing."""

    num_layers: int
    latent_width: int  # C, kv_lora_rank
    rope_width: int  # R, qk_rope_head_dim
    dtype: str  # "float32" | "bfloat16" | "float16"
    model_id: str  # digest of config and weights, from the checkpoint loader
    page_tokens: int = 64
    block_tokens: int = 512  # index block; a multiple of page_tokens
    version: int = 1  # of this byte map

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if self.block_tokens % self.page_tokens:
            raise ValueError(f"block_tokens {self.block_tokens} is not a multiple of {self.page_tokens}")

    @property
    def row_width(self) -> int:
        """W = C + R, numbers per token and layer."""
        return self.latent_width + self.rope_width

    @property
    def row_bytes(self) -> int:
        return self.row_width * DTYPE_BYTES[self.dtype]

    @property
    def row_bytes_all_layers(self) -> int:
        """Bytes of one token."""
        return self.row_bytes * self.num_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_tokens * self.row_bytes

    @property
    def page_bytes_all_layers(self) -> int:
        return self.page_bytes * self.num_layers

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal exactly when pages of two nodes are interchangeable."""
        fields = (
            self.version, self.num_layers, self.latent_width, self.rope_width,
            self.dtype, self.model_id, self.page_tokens, self.block_tokens,
        )  # fmt: skip
        return xxhash.xxh3_128_digest(repr(fields).encode())

    def offset_bytes(self, *, layer: int, page: int, row: int, num_pages: int) -> int:
        """Byte offset from the pool's base of one row of one page in a pool of `num_pages` pages."""
        return (layer * num_pages + page) * self.page_bytes + row * self.row_bytes

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)
