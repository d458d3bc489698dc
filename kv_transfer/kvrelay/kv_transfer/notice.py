"""The notification bound to each WRITE: which part of which hand-off has landed.

It is the only message that says so. With NIXL over UCX a standalone notification overtakes its data (12 of 12 runs
on CPUs, 2 of 2 on GPUs); the one bound to a WRITE follows it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.shard import Span
from kvrelay.core.types import Epoch
from kvrelay.kv_transfer.values import Part, Request

MAGIC = b"KVRL"
VERSION = 1
# magic, version, rank, epoch start id, epoch counter, request hash, attempt, part id, layer, start, end, checksum
_BODY = struct.Struct("<4sHHQQQIIIIIQ")
_DIGEST = struct.Struct("<Q")
NUM_BYTES = _BODY.size + _DIGEST.size


@dataclass(frozen=True, slots=True)
class NoticeKey:
    """Which epoch, request and attempt a notice belongs to; equal on both sides or the notice is stale."""

    decode_start_id: int
    counter: int
    request_hash: int  # xxh3-64 of the request id
    attempt: int

    @classmethod
    def of(cls, epoch: Epoch, request: Request) -> NoticeKey:
        return cls(
            epoch.decode.start_id,
            epoch.counter,
            xxhash.xxh3_64_intdigest(request.request_id.encode()),
            request.attempt,
        )


@dataclass(frozen=True, slots=True)
class Notice:
    key: NoticeKey
    rank: int
    part: Part


def encode(notice: Notice) -> bytes:
    """Return the notice in its fixed form of `NUM_BYTES` bytes."""
    key, part = notice.key, notice.part
    body = _BODY.pack(
        MAGIC, VERSION, notice.rank,
        key.decode_start_id, key.counter, key.request_hash, key.attempt,
        part.part_id, part.layer, part.tokens.start, part.tokens.end, part.checksum,
    )  # fmt: skip
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def decode(raw: bytes) -> Notice:
    """Return the notice in `raw`.

    Raises:
        InvalidRequestError: not a notice of this version, or damaged on the way.
    """
    if len(raw) != NUM_BYTES:
        raise InvalidRequestError(f"a notice of {len(raw)} bytes; it has {NUM_BYTES}")
    body = raw[: _BODY.size]
    if _DIGEST.unpack_from(raw, _BODY.size) != (xxhash.xxh3_64_intdigest(body),):
        raise InvalidRequestError("a notice whose digest does not match its bytes")
    magic, version, rank, start_id, counter, request_hash, attempt, part_id, layer, start, end, checksum = _BODY.unpack(
        body
    )
    if magic != MAGIC or version != VERSION:
        raise InvalidRequestError(f"a notice of kind {magic!r} version {version}; known: {MAGIC!r} version {VERSION}")
    key = NoticeKey(start_id, counter, request_hash, attempt)
    return Notice(key, rank, Part(part_id, layer, Span(start, end), checksum))
