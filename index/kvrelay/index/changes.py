"""The change stream: what holders publish and retract, in order, for mirrors to follow.

One bounded stream per fleet. The server numbers the entries from 1, so whoever finds a number skipped knows that it has
missed something: the stream was trimmed past it, or the server has lost its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.index.client import holder_of
from kvrelay.index.mirror_state import Holder

MAX_ENTRIES = 4096  # kept on the server, about; each is at most 512 hashes
HASH_BYTES = 16
INCOMPLETE = b"!incomplete-set!"  # as long as a hash; member of a holder's set while not all of its blocks are in it
ADDED, REMOVED, RESET, GONE = b"+", b"-", b"r", b"x"

# Lua of a function that tells the stream. KEYS: 3 the stream, 4 the number of its last entry. ARGV: 1 the holder,
# 3 how many entries are kept.
TELL = """
local function tell(kind, hashes)
  local number = redis.call('INCR', KEYS[4])
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'n', number, 'h', ARGV[1], 'k', kind, 'b', hashes)
end
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream."""

    number: int  # counts the entries of all holders, from 1
    holder: Holder
    kind: bytes
    hashes: tuple[bytes, ...]


def entry_of(fields: Mapping[bytes, bytes]) -> Entry:
    """Return an entry as the server gives it."""
    joined = fields[b"b"]
    hashes = tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
    return Entry(int(fields[b"n"]), Holder(*holder_of(fields[b"h"])), fields[b"k"], hashes)
