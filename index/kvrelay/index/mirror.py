"""A router's own copy of the prefix index: follows the change stream, heals from snapshots, says how sure it is.

A gap in the numbers, a reset of a holder, or a server that has lost its memory makes holders doubtful; each is then
read again as a whole. What is known of a doubtful holder stays: its node most likely still has those blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import UnavailableError
from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters
from kvrelay.index.changes import GONE, HASH_BYTES, INCOMPLETE, REMOVED, RESET, Entry, entry_of
from kvrelay.index.client import Keys, ask, connect, holder_id, holder_of
from kvrelay.index.mirror_state import Change, Holder, MirrorState
from kvrelay.index.reader import Holding

MAX_BLOCKS = 1 << 19
MAX_SILENCE_S = 1.0  # a copy that has not heard of the server for longer is not called exact
KEEP_S = 30.0  # a holder that the index lost is remembered this long, as it is there before its lease runs out
_BLOCK_S = 0.25  # an idle stream answers after this
_ROLL_CALL_S = 10.0
_SNAPSHOT_PAUSE_S = 0.25  # between two snapshots of one holder
_RETRY_S = 0.25
_TIMEOUT_S = 2.0
_READ_ENTRIES = 256
_SCAN_HASHES = 4096

# KEYS: holders. ARGV: prefix of block sets. Answers those whose lease is not over; the others are struck off.
_ROLL = """
local here = {}
for _, holder in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. holder) == 1 then here[#here + 1] = holder
  else redis.call('SREM', KEYS[1], holder) end
end
return here
"""

log = logging.getLogger(__name__)


class IndexMirror:
    """Follows the index of one fleet once started. To be used from one event loop."""

    def __init__(self, url: str, fleet: str, *, max_blocks: int = MAX_BLOCKS, clock: Clock = monotonic) -> None:
        self._keys = Keys(fleet)
        self._redis = connect(url, timeout_s=_TIMEOUT_S)
        self._roll = self._redis.register_script(_ROLL)
        self._clock = clock
        self._max_blocks = max_blocks
        self._state = MirrorState(max_blocks=max_blocks)
        self._nothing: dict[Holder, Holding] = {}  # of holders that have nothing of a prompt
        self._numbers: dict[Holder, int] = {}  # changes applied, per holder
        self._absent_since_s: dict[Holder, float] = {}
        self._snapshot_s: dict[Holder, float] = {}  # when it was read as a whole
        self._position: bytes | None = None  # in the stream; None = everything is to be read again
        self._last_number = 0
        self._behind = True  # there is more in the stream than was read, or there should be
        self._heard_s = float("-inf")
        self._roll_called_s = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.counters = Counters()  # index_mirror_changes, _snapshots, _gaps

    async def start(self) -> None:
        """Begin to follow."""
        self._task = keep(self._run(), name="index mirror")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._redis.aclose()

    @property
    def num_blocks(self) -> int:
        return self._state.num_blocks

    @property
    def silent_s(self) -> float:
        """Return how long the server has not been heard of; infinite before the first time."""
        return self._clock() - self._heard_s

    @property
    def is_exact(self) -> bool:
        """Say whether this copy is what the index says now, up to what is on the wire."""
        return not (
            self._position is None
            or self._behind
            or self._state.is_truncated
            or self._state.incomplete()
            or self.silent_s > MAX_SILENCE_S
        )

    def longest(self, hashes: Sequence[bytes]) -> tuple[Holding, ...]:
        """Return how many leading blocks of a prompt each known holder has."""
        found = self._state.found(hashes)
        if self._nothing.keys() != self._state.known():
            self._nothing = {holder: _holding(holder, 0) for holder in self._state.holders}
        some = {holder: _holding(holder, depth) for holder, depth in found}
        return tuple((self._nothing | some).values())

    async def _run(self) -> None:
        reachable = True
        while True:
            try:
                await self._follow()
                reachable = True
            except UnavailableError as err:
                if reachable:
                    log.warning("the index mirror is cut off: %s", err)
                reachable = False
                await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        """Read once from the stream, and mend what is doubtful."""
        if self._position is None:
            await self._start_over()
        block_ms = int(_BLOCK_S * 1000)
        position = {self._keys.changes: self._position}
        answer = await ask(self._redis.xread(position, count=_READ_ENTRIES, block=block_ms))  # type: ignore[arg-type]
        entries: list[tuple[bytes, dict[bytes, bytes]]] = answer[0][1] if answer else []
        for name, fields in entries:
            self._position = name
            self._take(entry_of(fields))
        if entries:
            self._behind = len(entries) == _READ_ENTRIES
        else:
            await self._check_nothing_is_missing()
        self._heard_s = self._clock()
        if self._heard_s - self._roll_called_s >= _ROLL_CALL_S:
            await self._call_the_roll()
        await self._mend()

    def _take(self, entry: Entry) -> None:
        if entry.number != self._last_number + 1:
            self._doubt_all()
        self._last_number = entry.number
        holder = entry.holder
        if entry.kind == GONE:
            self._forget(holder)
            return
        number = self._numbers[holder] = self._numbers.get(holder, 0) + 1
        hashes = tuple(one for one in entry.hashes if one != INCOMPLETE)
        self._state.apply(
            Change(
                holder,
                number,
                added=() if entry.kind == REMOVED else hashes,
                removed=hashes if entry.kind == REMOVED else (),
                is_reset=entry.kind == RESET,
            )
        )
        self._absent_since_s.pop(holder, None)
        if INCOMPLETE in entry.hashes:
            self._snapshot_s.pop(holder, None)  # it has just become complete: read it without a pause
        self.counters.add("index_mirror_changes")

    async def _check_nothing_is_missing(self) -> None:
        """Compare with the number of the last change. The second time that it differs, entries were lost."""
        told = int(await ask(self._redis.get(self._keys.last_change)) or 0)
        if told == self._last_number:
            self._behind = False
        elif self._behind:
            self._position = None
        else:
            self._behind = True  # it may have come just now; the next read will tell

    async def _start_over(self) -> None:
        """Find the end of the stream; every holder is to be read again."""
        self._doubt_all()
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.get(self._keys.last_change)
        pipeline.xrevrange(self._keys.changes, count=1)
        told, last = await ask(pipeline.execute())
        self._last_number = int(told or 0)
        self._position = last[0][0] if last else b"0-0"
        self._behind = False
        await self._call_the_roll()

    def _doubt_all(self) -> None:
        if self._state.holders:
            self.counters.add("index_mirror_gaps")
        for holder in self._state.holders:
            self._state.doubt(holder)
        self._snapshot_s.clear()

    async def _call_the_roll(self) -> None:
        """Enter holders that are new to us, and forget those that the index has not had for a while."""
        raw = await ask(self._roll(keys=[self._keys.holders], args=[self._keys.blocks_prefix]))
        listed = {Holder(*holder_of(one)) for one in raw}
        self._roll_called_s = self._clock()
        if self._state.is_truncated:
            await self._try_to_fit(listed)
        for holder in listed - set(self._state.holders):
            await self._snapshot(holder)
        for holder in set(self._state.holders) - listed:
            self._missed(holder)

    async def _try_to_fit(self, holders: set[Holder]) -> None:
        """Begin again with an empty copy when everything would fit into it by now."""
        sizes = [await ask(self._redis.scard(self._set_of(holder))) for holder in holders]
        if sum(sizes) <= self._max_blocks:
            self._state.clear()
            self._numbers.clear()

    async def _mend(self) -> None:
        now_s = self._clock()
        for holder in () if self._state.is_truncated else self._state.incomplete():
            if now_s - self._snapshot_s.get(holder, float("-inf")) >= _SNAPSHOT_PAUSE_S:
                await self._snapshot(holder)

    async def _snapshot(self, holder: Holder) -> None:
        """Read one holder as a whole. What changes meanwhile comes again by the stream, where order does no harm."""
        self._snapshot_s[holder] = self._clock()
        hashes: list[bytes] = []
        cursor, seen = 0, False
        while cursor or not seen:
            page: tuple[int, list[bytes]] = await ask(self._scan(holder, cursor))
            cursor, seen = page[0], True
            hashes += page[1]
        if not hashes:  # not even the sign of life
            self._missed(holder)
            return
        self._absent_since_s.pop(holder, None)
        blocks = [one for one in hashes if len(one) == HASH_BYTES and one != INCOMPLETE]
        self._state.replace(holder, number=self._numbers.get(holder, 0), hashes=blocks)
        if INCOMPLETE in hashes:
            self._state.doubt(holder)
        self.counters.add("index_mirror_snapshots")

    def _scan(self, holder: Holder, cursor: int) -> Any:
        return self._redis.sscan(self._set_of(holder), cursor, count=_SCAN_HASHES)

    def _missed(self, holder: Holder) -> None:
        """The index has lost a holder: by the end of its lease, or by an eviction, which its writer will notice."""
        if holder in self._state.holders:
            now_s = self._clock()
            if now_s - self._absent_since_s.setdefault(holder, now_s) >= KEEP_S:
                self._forget(holder)

    def _forget(self, holder: Holder) -> None:
        self._state.forget(holder)
        for known in (self._numbers, self._absent_since_s, self._snapshot_s):
            known.pop(holder, None)

    def _set_of(self, holder: Holder) -> bytes:
        return self._keys.blocks_prefix.encode() + holder_id(holder.node, holder.role, holder.tier)


def _holding(holder: Holder, num_blocks: int) -> Holding:
    return Holding(holder.node, holder.role, num_blocks, holder.tier)
