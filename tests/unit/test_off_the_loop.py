"""What a million-token prompt asks of an event loop is done beside it, and is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from kvrelay.core import hash_on_loop, prefix_hash
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.shard import Span
from kvrelay.kv_transfer import wire
from kvrelay.kv_transfer.values import Manifest, Part

T = TypeVar("T")
ROW_BYTES = 576


async def turns_during(work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    """Return what `work` returns, and how often the loop came round meanwhile."""
    task, turns = asyncio.create_task(work), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return task.result(), turns


def a_manifest(num_parts: int) -> Manifest:
    parts = tuple(Part(number, number % 61, Span(number, number + 64), number) for number in range(num_parts))
    return Manifest(1, parts)


async def test_a_million_tokens_are_hashed_beside_the_loop() -> None:
    tokens = np.arange(1 << 20, dtype=np.int32)
    names, turns = await turns_during(hash_on_loop.chain(b"seed", tokens, block_tokens=64))

    assert names == prefix_hash.chain(b"seed", tokens, block_tokens=64)
    assert turns > 2


@pytest.mark.parametrize(("num_parts", "beside"), [(8, False), (8000, True)])
async def test_a_long_manifest_is_written_and_read_beside_the_loop(num_parts: int, beside: bool) -> None:
    manifest = a_manifest(num_parts)
    message, writing = await turns_during(wire.manifest_to_pb_on_loop(manifest, row_bytes=ROW_BYTES))
    read, reading = await turns_during(wire.manifest_from_pb_on_loop(message, row_bytes=ROW_BYTES))

    assert read == manifest
    assert (writing > 2, reading > 2) == (beside, beside)


def test_a_manifest_whose_bytes_are_not_those_of_its_parts_is_refused() -> None:
    message = wire.manifest_to_pb(a_manifest(3), row_bytes=ROW_BYTES)
    message.num_bytes += 1
    with pytest.raises(InvalidRequestError, match=f"{message.num_bytes} bytes whose parts have {3 * 64 * ROW_BYTES}"):
        wire.manifest_from_pb(message, row_bytes=ROW_BYTES)
