"""Where the routers of a fleet tell each other what they have placed: each time only what has changed.

A router's account lives for LEASE_S in three keys: which version of which life it is, the version in which each node's
load last changed, and the loads. Whoever knows a version asks for what came after it. A router whose account the server
has lost, or that does not know whether its last word was heard, tells everything anew as another life.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.types import Incarnation
from kvrelay.index.client import Keys, ask, connect
from kvrelay.proto.v1.fleet_pb2 import NodeLoad

LEASE_S = 3.0
_TIMEOUT_S = 1.0

# KEYS: names, own account. ARGV: own name, ttl in ms, prefix of accounts, account as it should be ('' = made anew),
# account as it will be, its version, number of loads, (node, load) of each, then (name, account) of others as known.
# Answers false when the account is not what it should be, else of each other router {name, account, is whole, loads}.
_EXCHANGE = """
local own, ttl = KEYS[2], ARGV[2]
if ARGV[4] == '' then
  redis.call('DEL', own .. ':versions', own .. ':loads')
elseif redis.call('GET', own) ~= ARGV[4] then
  return false
end
local at = 8
for _ = 1, tonumber(ARGV[7]) do
  redis.call('ZADD', own .. ':versions', ARGV[6], ARGV[at])
  redis.call('HSET', own .. ':loads', ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.call('SET', own, ARGV[5], 'PX', ttl)
redis.call('PEXPIRE', own .. ':versions', ttl)
redis.call('PEXPIRE', own .. ':loads', ttl)
redis.call('SADD', KEYS[1], ARGV[1])
local known = {}
for here = at, #ARGV, 2 do known[ARGV[here]] = ARGV[here + 1] end
local found = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if name ~= ARGV[1] then
    local account = redis.call('GET', ARGV[3] .. name)
    if account then
      local life, before, least = string.sub(account, 1, 16), known[name], '-inf'
      if before and string.sub(before, 1, 16) == life then least = '(' .. string.sub(before, 17) end
      local loads = {}
      for _, node in ipairs(redis.call('ZRANGEBYSCORE', ARGV[3] .. name .. ':versions', least, '+inf')) do
        loads[#loads + 1] = redis.call('HGET', ARGV[3] .. name .. ':loads', node)
      end
      found[#found + 1] = {name, account, least == '-inf' and 1 or 0, loads}
    else
      redis.call('SREM', KEYS[1], name)
    end
  end
end
return found
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What another router has told since it was last heard."""

    router: str
    is_whole: bool  # these loads are all that it has; else the others are as before
    loads: tuple[NodeLoad, ...]  # one that is empty but for the node is over


class RouterLoads:
    """Of one router. Every method is one round trip and raises UnavailableError when it fails."""

    def __init__(self, url: str, fleet: str, me: Incarnation) -> None:
        self._keys = Keys(fleet)
        self._redis = connect(url, timeout_s=_TIMEOUT_S)
        self._exchange = self._redis.register_script(_EXCHANGE)
        # A name that two routers never share, even when their operator gave them the same one.
        self._name = str(me)
        self._account = self._life = ""
        self._version = 0
        self._known: dict[str, str] = {}  # accounts of the others

    async def exchange(self, loads: Sequence[NodeLoad], *, is_whole: bool) -> list[Told] | None:
        """Tell what this router has placed, and return what the others told less than LEASE_S ago.

        Args:
            is_whole: the loads are all there are, else those that have changed since the last time.

        Returns:
            Of every other router what is new; None when all must be told: nothing was taken.
        """
        if not is_whole and not self._account:
            return None
        before, version = self._account, self._version + 1
        if is_whole:
            before, version, self._life = "", 1, os.urandom(8).hex()
        account = f"{self._life}{version}"
        self._account = ""  # until it is known that this was heard
        told = [part for load in loads for part in (_key(load), load.SerializeToString())]
        known = [part for one in self._known.items() for part in one]
        found = await ask(
            self._exchange(
                keys=[self._keys.router_names, self._keys.router_prefix + self._name],
                args=[
                    self._name, int(LEASE_S * 1000), self._keys.router_prefix, before, account, version, len(loads),
                    *told, *known,
                ],
            )
        )  # fmt: skip
        if found is None:
            return None
        self._account, self._version = account, version
        self._known = {name.decode(): of_other.decode() for name, of_other, _, _ in found}
        return [
            Told(name.decode(), bool(whole), tuple(map(NodeLoad.FromString, of_other)))
            for name, _, whole, of_other in found
        ]

    async def withdraw(self) -> None:
        own = self._keys.router_prefix + self._name
        await ask(self._redis.delete(own, f"{own}:versions", f"{own}:loads"))

    async def close(self) -> None:
        await self._redis.aclose()


def _key(load: NodeLoad) -> bytes:
    return load.node.start_id.to_bytes(8, "big") + load.node.name.encode()
