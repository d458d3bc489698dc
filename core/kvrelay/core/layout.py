"""The bytes of a latent page, defined once for both pools, and the fingerprint that two nodes compare before they talk.

A pool is ONE allocation of `num_layers` slabs; a slab is `num_pages` pages; a page is `page_tokens` rows; a row is the
token's normalised latent (C numbers) followed by its rotated rope key (R numbers, half-split order). So pages that are
neighbours in a layer are neighbours in memory, and a run of pages is one contiguous piece.

The format of a row says in what numbers. `model`: all in the model's dtype. `fp8`: the latent in e4m3, one byte each,
then a scale in fp32 per 128 of them (one for all when there are fewer), then the rope key in bf16; see `kernels.quant`.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LATENT_FORMATS = ("model", "fp8")
FP8_GROUP_NUMBERS = 128


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
    latent_format: str = "model"  # one of LATENT_FORMATS

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if self.block_tokens % self.page_tokens:
            raise ValueError(f"block_tokens {self.block_tokens} is not a multiple of {self.page_tokens}")
        if self.latent_format not in LATENT_FORMATS:
            raise ValueError(f"latent_format {self.latent_format!r} is not one of {sorted(LATENT_FORMATS)}")
        if self.latent_format == "fp8" and (why := fp8_refuses(self.latent_width)) is not None:
            raise ValueError(f"latent_format fp8: {why}")

    @property
    def row_width(self) -> int:
        """W = C + R, numbers per token and layer."""
        return self.latent_width + self.rope_width

    @property
    def row_bytes(self) -> int:
        if self.latent_format == "fp8":
            return fp8_row_bytes(self.latent_width, self.rope_width)
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
            # Builds that know one format only give its layouts the same name.
            *(() if self.latent_format == "model" else (self.latent_format,)),
        )  # fmt: skip
        return xxhash.xxh3_128_digest(repr(fields).encode())

    def offset_bytes(self, *, layer: int, page: int, row: int, num_pages: int) -> int:
        """Byte offset from the pool's base of one row of one page in a pool of `num_pages` pages."""
        return (layer * num_pages + page) * self.page_bytes + row * self.row_bytes

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


def fp8_groups(latent_width: int) -> int:
    """Return how many scales a row of fp8 has; widths above 128 are multiples of it."""
    groups, rest = divmod(latent_width, FP8_GROUP_NUMBERS)
    assert groups == 0 or rest == 0, f"{latent_width} does not fill its groups"
    return max(1, groups)


def fp8_row_bytes(latent_width: int, rope_width: int) -> int:
    return latent_width + 4 * fp8_groups(latent_width) + 2 * rope_width


def fp8_refuses(latent_width: int) -> str | None:
    """Return None, or the reason why latents of this width have no fp8 rows.

    Scales lie at multiples of 4 bytes, and the kernels take 1, 2, 4, ... whole groups.
    """
    groups, rest = divmod(latent_width, FP8_GROUP_NUMBERS)
    if groups == 0:
        return None if rest % 4 == 0 else f"a latent width of {latent_width} is not a multiple of 4"
    if rest or groups & (groups - 1):
        return f"a latent width of {latent_width}, above 127, is not {FP8_GROUP_NUMBERS} times a power of two"
    return None
