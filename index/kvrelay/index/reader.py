"""Who holds how much of a prompt: one question, one round trip, one answer that says how sure it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import UnavailableError
from kvrelay.core.types import Incarnation, Role, Tier
from kvrelay.index.changes import INCOMPLETE
from kvrelay.index.client import Keys, ask, connect, holder_of

TIMEOUT_S = 0.2
PAUSE_S = 1.0  # after a failure nobody waits for the server again this long

# KEYS: holders. ARGV: prefix of block sets, hashes in one string, the mark of an incomplete set.
# Asks in growing slices and stops at the first block that is missing, so a miss costs one look-up.
_LONGEST = """
local answer, num_blocks = {}, #ARGV[2] / 16
for _, holder in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. holder
  if redis.call('EXISTS', key) == 0 then
    redis.call('SREM', KEYS[1], holder)
  else
    local found, slice, complete = 0, 1, true
    while complete and found < num_blocks do
      local names = {}
      for block = found, math.min(found + slice, num_blocks) - 1 do
        names[#names + 1] = string.sub(ARGV[2], block * 16 + 1, block * 16 + 16)
      end
      for _, held in ipairs(redis.call('SMISMEMBER', key, unpack(names))) do
        if held == 0 then complete = false break end
        found = found + 1
      end
      slice = math.min(slice * 8, 512)
    end
    answer[#answer + 1] = {holder, found, redis.call('SISMEMBER', key, ARGV[3])}
  end
end
return answer
"""


class Confidence(Enum):
    """How sure an answer is."""

    EXACT = "exact"
    DEGRADED = "degraded"  # some holder's blocks are not all in the index, or the answer is a while old
    FALLBACK = "fallback"  # the index did not answer


@dataclass(frozen=True, slots=True)
class Holding:
    """How much of the asked prefix one node holds, in one tier or nearer."""

    node: Incarnation
    role: Role
    num_blocks: int
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Match:
    """An answer; lists every holder the index knows, also those that hold nothing of the prompt.

    Whether a holder's node is alive is for the registry to say.
    """

    holdings: tuple[Holding, ...]
    confidence: Confidence


NO_ANSWER = Match((), Confidence.FALLBACK)


class PrefixReader:
    """Asks the index of one fleet. Never raises and never takes longer than TIMEOUT_S."""

    def __init__(self, url: str, fleet: str, clock: Clock = monotonic) -> None:
        self._keys = Keys(fleet)
        self._redis = connect(url, timeout_s=TIMEOUT_S)
        self._longest = self._redis.register_script(_LONGEST)
        self._clock = clock
        self._paused_until_s = 0.0

    async def longest(self, hashes: Sequence[bytes]) -> Match:
        """Return how many leading blocks of `hashes` each holder has; FALLBACK when the server does not answer."""
        if self._clock() < self._paused_until_s:
            return NO_ANSWER
        args: list[bytes | str] = [self._keys.blocks_prefix, b"".join(hashes), INCOMPLETE]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                raw = await ask(self._longest(keys=[self._keys.holders], args=args))
        except (UnavailableError, TimeoutError):
            self._paused_until_s = self._clock() + PAUSE_S
            return NO_ANSWER
        named = ((*holder_of(holder), num_blocks) for holder, num_blocks, _ in raw)
        holdings = tuple(Holding(node, role, num_blocks, tier) for node, role, tier, num_blocks in named)
        degraded = any(incomplete for _, _, incomplete in raw)
        return Match(holdings, Confidence.DEGRADED if degraded else Confidence.EXACT)

    async def close(self) -> None:
        await self._redis.aclose()
