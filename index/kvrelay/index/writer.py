"""What a node tells the index about its blocks.

Each holder has one set of hashes, so a node that is gone takes its blocks with it when the set's lease runs out. A node
with host memory behind its cache is two holders: of what is in the pool, and of what is there or in host memory. So the
longest prefix can be asked of both, and a block that leaves the pool for host memory changes only the first. The set
also tells whether the server has lost it: a writer that finds its set missing gives all its hashes again. What
changes in a set is told to the change stream in the same step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from kvrelay.core.errors import UnavailableError
from kvrelay.core.supervise import keep
from kvrelay.core.types import Counters, Incarnation, Role, Tier
from kvrelay.index import changes
from kvrelay.index.changes import INCOMPLETE, TELL
from kvrelay.index.client import Keys, ask, connect, holder_id

LEASE_S = 30.0
KEEPALIVE_S = 5.0
MAX_PENDING = 1 << 18  # hashes that wait for the server
_BATCH = 4096
_TIMEOUT_S = 2.0
_RETRY_S = 1.0

# KEYS: holders, blocks, changes, last change. ARGV: holder, lease in ms, entries kept, then pairs of a kind and hashes
# in one string: '+' and '-' also go to the change stream, 'a' adds quietly, 'r' forgets all that was told before.
# Answers whether the set was there before. '!alive' is in every set, so that a holder of nothing still has one.
_APPLY = (
    TELL
    + """
local was_there = redis.call('EXISTS', KEYS[2])
if ARGV[4] == 'r' then redis.call('DEL', KEYS[2]) end
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('SADD', KEYS[2], '!alive')
redis.call('PEXPIRE', KEYS[2], ARGV[2])
if ARGV[4] == 'r' then tell('r', '') elseif was_there == 0 then tell('+', '') end
for at = 4, #ARGV, 2 do
  local command = ARGV[at] == '-' and 'SREM' or 'SADD'
  for first = 1, #ARGV[at + 1], 16 * 512 do
    local last = math.min(first + 16 * 512 - 1, #ARGV[at + 1])
    local names = {}
    for start = first, last, 16 do
      names[#names + 1] = string.sub(ARGV[at + 1], start, start + 15)
    end
    redis.call(command, KEYS[2], unpack(names))
    if ARGV[at] ~= 'a' then tell(ARGV[at], string.sub(ARGV[at + 1], first, last)) end
  end
end
return was_there
"""
)

# The same keys; ARGV: holder, nothing, entries kept.
_LEAVE = (
    TELL
    + """
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[1], ARGV[1])
tell('x', '')
"""
)

log = logging.getLogger(__name__)


class PrefixWriter:
    """Publishes the blocks of one life of one node. To be used from one event loop.

    `publish` and `retract` only queue and never wait; a task of the writer sends. When the queue overflows, or the
    server comes back without our set, everything is given again from `all_hashes`, and until that is done the set is
    marked incomplete.
    """

    def __init__(
        self,
        url: str,
        fleet: str,
        *,
        node: Incarnation,
        role: Role,
        all_hashes: Callable[[], Iterable[bytes]],
        tier: Tier = Tier.DEVICE,
        counters: Counters | None = None,
    ) -> None:
        """
        Args:
            counters: to count in, when one writer is not all; None = its own.
            all_hashes: returns the hashes of all blocks that the node holds now; called on the event loop.
        """
        keys = Keys(fleet)
        self._redis = connect(url, timeout_s=_TIMEOUT_S)
        self._apply = self._redis.register_script(_APPLY)
        self._leave = self._redis.register_script(_LEAVE)
        self._holder = holder_id(node, role, tier)
        blocks_key = keys.blocks_prefix.encode() + self._holder
        self._keys: list[bytes | str] = [keys.holders, blocks_key, keys.changes, keys.last_change]
        self._all_hashes = all_hashes
        self._pending: deque[tuple[bytes, bytes]] = deque()  # (b"+" or b"-", hash), in order
        self._wake = asyncio.Event()
        self._must_republish = False
        self._set_exists = False  # on the server, as far as we know
        self._task: asyncio.Task[None] | None = None
        self.counters = Counters() if counters is None else counters  # published, retracted, dropped, republished

    async def start(self) -> None:
        """Begin to send."""
        self._task = keep(self._run(), name="prefix writer")

    async def stop(self) -> None:
        """Stop sending and take this holder out of the index if the server answers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await ask(self._leave(keys=self._keys, args=[self._holder, 0, changes.MAX_ENTRIES]))
        except UnavailableError as err:
            log.info("not withdrawn from the index, its lease will: %s", err)
        await self._redis.aclose()

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Say that the node holds these blocks now, first block of a prefix first."""
        self._queue(b"+", hashes)

    def retract(self, hashes: Sequence[bytes]) -> None:
        """Say that the node holds these blocks no more."""
        self._queue(b"-", hashes)

    def _queue(self, sign: bytes, hashes: Sequence[bytes]) -> None:
        if len(self._pending) + len(hashes) > MAX_PENDING:
            self.counters.add("index_dropped", len(self._pending) + len(hashes))
            self._pending.clear()
            self._must_republish = True
        else:
            self._pending.extend((sign, one) for one in hashes)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            try:
                if self._must_republish:
                    await self._republish()
                else:
                    await self._send_pending()
            except UnavailableError as err:
                log.warning("blocks not published, trying again: %s", err)
                self._must_republish = True
                await asyncio.sleep(_RETRY_S)
                continue
            if self._pending or self._must_republish:
                continue
            self._wake.clear()
            with suppress(TimeoutError):  # then it is time for a sign of life
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._wake.wait()

    async def _send_pending(self) -> None:
        """Send one batch, which may be empty: then it only renews the lease."""
        batch = [self._pending.popleft() for _ in range(min(_BATCH, len(self._pending)))]
        was_there = await self._send(_grouped(batch))
        self._must_republish = self._must_republish or (self._set_exists and not was_there)
        self._set_exists = True
        for sign, name in ((b"+", "index_published"), (b"-", "index_retracted")):
            self.counters.add(name, sum(1 for one, _ in batch if one == sign))

    async def _republish(self) -> None:
        self._must_republish = False  # an overflow from here on asks for another round
        hashes = iter(list(self._all_hashes()))
        await self._send([b"r", b"", b"a", INCOMPLETE])
        kept = True
        while batch := list(islice(hashes, _BATCH)):
            kept &= await self._send([b"a", b"".join(batch)])  # quietly: a mirror will ask for all when they are here
        kept &= await self._send([b"-", INCOMPLETE])
        self._must_republish = self._must_republish or not kept
        self._set_exists = True
        self.counters.add("index_republished")

    async def _send(self, operations: list[bytes]) -> bool:
        args: list[bytes | int] = [self._holder, int(LEASE_S * 1000), changes.MAX_ENTRIES, *operations]
        return bool(await ask(self._apply(keys=self._keys, args=args)))


def _grouped(batch: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """Return runs of equal sign as alternating sign and joined hashes."""

    def runs() -> Iterator[tuple[bytes, list[bytes]]]:
        run: list[bytes] = []
        for at, (sign, one) in enumerate(batch):
            run.append(one)
            if at + 1 == len(batch) or batch[at + 1][0] != sign:
                yield sign, run
                run = []

    return [part for sign, run in runs() for part in (sign, b"".join(run))]
