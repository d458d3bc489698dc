"""Several notices in one: what one write announces when it stands for several parts."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_HEAD = struct.Struct("<4sH")  # magic, notices
_MAGIC = b"KVRB"  # no notice begins like this


def bundle(notices: Sequence[bytes]) -> bytes:
    """Return one notice for all; one alone stays as it is."""
    if len(notices) == 1:
        return notices[0]
    sizes = struct.pack(f"<{len(notices)}H", *map(len, notices))
    return b"".join((_HEAD.pack(_MAGIC, len(notices)), sizes, *notices))


def unbundle(raw: bytes) -> list[bytes]:
    """Return the notices in their order; what is no bundle in one piece is a notice itself."""
    if not raw.startswith(_MAGIC) or len(raw) < _HEAD.size:
        return [raw]
    _, number = _HEAD.unpack_from(raw)
    begin = _HEAD.size + 2 * number
    if len(raw) < begin:
        return [raw]
    sizes = struct.unpack_from(f"<{number}H", raw, _HEAD.size)
    if len(raw) != begin + sum(sizes):
        return [raw]
    found = []
    for size in sizes:
        found.append(raw[begin : begin + size])
        begin += size
    return found
