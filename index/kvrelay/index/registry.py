"""Which nodes exist: each keeps a record alive by heartbeats, routers read them all.

A record is stored behind the eight bytes of its start id, so that the server itself can tell lives of a node apart.
"""

from __future__ import annotations

import secrets

from kvrelay.core.errors import StaleMessageError
from kvrelay.core.types import Incarnation
from kvrelay.index.client import Keys, ask, connect
from kvrelay.proto.v1.fleet_pb2 import NodeRecord

LEASE_S = 6.0
_TIMEOUT_S = 1.0
_START_ID_BYTES = 8

# KEYS: names, record, life. ARGV: name, start id, record, ttl in ms, "1" to replace another life, a new life.
_PUT = """
local held = redis.call('GET', KEYS[2])
if held and ARGV[5] == '0' and string.sub(held, 1, 8) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[2], ARGV[2] .. ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('SETNX', KEYS[3], ARGV[6])
return 1
"""
# KEYS: names, record. ARGV: name, start id.
_WITHDRAW = """
local held = redis.call('GET', KEYS[2])
if not held or string.sub(held, 1, 8) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[1], ARGV[1])
return 1
"""
# KEYS: names, life. ARGV: prefix of records.
_LIST = """
local found = {redis.call('GET', KEYS[2]) or ''}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local held = redis.call('GET', ARGV[1] .. name)
  if held then found[#found + 1] = held else redis.call('SREM', KEYS[1], name) end
end
return found
"""


class NodeRegistry:
    """The registry of one fleet. Every method is one round trip and raises UnavailableError when it fails."""

    def __init__(self, url: str, fleet: str) -> None:
        self.life = b""  # of what `nodes` returned last: another one when the server has lost all records meanwhile
        self._keys = Keys(fleet)
        self._redis = connect(url, timeout_s=_TIMEOUT_S)
        self._put = self._redis.register_script(_PUT)
        self._withdraw = self._redis.register_script(_WITHDRAW)
        self._list = self._redis.register_script(_LIST)

    async def register(self, record: NodeRecord, ttl_s: float = LEASE_S) -> None:
        """Enter a node; an older life of the same name is replaced."""
        await self._write(record, ttl_s, replace=True)

    async def heartbeat(self, record: NodeRecord, ttl_s: float = LEASE_S) -> None:
        """Keep a node's record alive and current; enters it again when the server has lost it.

        Raises:
            StaleMessageError: a newer life of this name has registered; this one is over.
        """
        if not await self._write(record, ttl_s, replace=False):
            raise StaleMessageError(f"another process has registered as node {record.node.name!r}")

    async def withdraw(self, node: Incarnation) -> None:
        """Take a node out at once; nothing happens when a newer life has its name."""
        keys = [self._keys.node_names, self._keys.node_prefix + node.name]
        await ask(self._withdraw(keys=keys, args=[node.name, _start_id(node.start_id)]))

    async def nodes(self) -> list[NodeRecord]:
        """Return the records of all nodes whose lease has not run out."""
        keys = [self._keys.node_names, self._keys.node_life]
        self.life, *raw = await ask(self._list(keys=keys, args=[self._keys.node_prefix]))
        return [NodeRecord.FromString(one[_START_ID_BYTES:]) for one in raw]

    async def close(self) -> None:
        await self._redis.aclose()

    async def _write(self, record: NodeRecord, ttl_s: float, *, replace: bool) -> bool:
        name, start_id = record.node.name, _start_id(record.node.start_id)
        keys = [self._keys.node_names, self._keys.node_prefix + name, self._keys.node_life]
        record_bytes, life = record.SerializeToString(), secrets.token_bytes(8)
        args: list[bytes | str | int] = [name, start_id, record_bytes, int(ttl_s * 1000), int(replace), life]
        return bool(await ask(self._put(keys=keys, args=args)))


def _start_id(start_id: int) -> bytes:
    return start_id.to_bytes(_START_ID_BYTES, "big")
