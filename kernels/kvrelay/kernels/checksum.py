"""A 64-bit checksum of bytes that a GPU can compute at memory speed, and the same on a CPU.

The bytes are little-endian 8-byte words w[0], w[1], ...; the sum over i of mix(w[i] + key(i)), modulo 2 ** 64, where
mix is a bijection of 64 bits (the finaliser of SplitMix64) and key(i) = (i + 1) * 0x9E3779B97F4A7C15. A sum, so parts
may be added in any order; a changed word changes its own term for certain, and words that change places change two
terms that cancel with a chance of about 2 ** -64. Against accidents, not against an adversary.

Sums of pieces add up: the sum of a + b is sum(a) + sum(b from word len(a)), so a part that lies in several places is
summed place by place with `first_word`.

Source of the finaliser: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014); constants of
variant 13 by D. Stafford.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels.pieces import WORD_BYTES
from kvrelay.kernels.triton_support import triton_refuses

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_BLOCK_WORDS = 1 << 17  # of one numpy pass: its temporaries stay in the cache


def checksum(rows: Tensor, *, first_word: int = 0) -> Tensor:
    """Return the sum of a tensor's bytes as an int64 tensor of one element on its device; does not wait for it.

    Args:
        rows: contiguous, any dtype, a whole number of words.
        first_word: number of words that stand before it in what is summed.
    """
    words = as_words(rows)
    if words.is_cuda and triton_refuses("cuda") is None:
        from kvrelay.kernels.triton_checksum import word_sum  # noqa: PLC0415 - optional

        return word_sum(words, first_word=first_word)
    value = checksum_bytes(words.cpu().numpy().data, first_word=first_word)
    return torch.tensor([to_signed(value)], device=rows.device)


def checksum_bytes(memory: memoryview, *, first_word: int = 0) -> int:
    """Return the sum, 0 to 2 ** 64 - 1, of host memory: a whole number of words."""
    words = np.frombuffer(memory, np.uint64)
    total = 0
    for start in range(0, len(words), _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        index = np.arange(first_word + start + 1, first_word + start + 1 + len(block), dtype=np.uint64)
        index *= np.uint64(GOLDEN)
        index += block
        total += int(_mixed(index).sum(dtype=np.uint64))
    return total % (1 << 64)


def checksum_ranges(memory: memoryview, ranges: Sequence[tuple[int, int]]) -> int:
    """Return the sum of the pieces (offset_bytes, num_bytes) of host memory, in the order given, whole words each."""
    total, words = 0, 0
    for offset_bytes, num_bytes in ranges:
        assert offset_bytes + num_bytes <= len(memory), "a range ends behind the memory"
        total += checksum_bytes(memory[offset_bytes : offset_bytes + num_bytes], first_word=words)
        words += num_bytes // WORD_BYTES
    return total % (1 << 64)


def to_signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned sum."""
    return value - (1 << 64) if value >= 1 << 63 else value


def to_unsigned(value: int) -> int:
    """Return the sum, 0 to 2 ** 64 - 1, that an int64 tensor's element stands for."""
    return value % (1 << 64)


def as_words(rows: Tensor) -> Tensor:
    assert rows.is_contiguous(), "the bytes to sum are one piece"
    assert rows.numel() * rows.element_size() % WORD_BYTES == 0, "the bytes to sum are whole words"
    return rows.view(-1).view(torch.int64)


def _mixed(z: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    return z
