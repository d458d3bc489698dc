"""Where the routers of a fleet tell each other what they have placed."""

from __future__ import annotations

from kvrelay.index.client import Keys, ask, connect
from kvrelay.proto.convert import incarnation_from_pb
from kvrelay.proto.v1.fleet_pb2 import RouterLoad

LEASE_S = 3.0
_TIMEOUT_S = 1.0

# KEYS: names, own record. ARGV: own name, record, ttl in ms, prefix of records. Answers the records of the others.
_EXCHANGE = """
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
local found = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if name ~= ARGV[1] then
    local held = redis.call('GET', ARGV[4] .. name)
    if held then found[#found + 1] = held else redis.call('SREM', KEYS[1], name) end
  end
end
return found
"""


class RouterLoads:
    """Every method is one round trip and raises UnavailableError when it fails."""

    def __init__(self, url: str, fleet: str) -> None:
        self._keys = Keys(fleet)
        self._redis = connect(url, timeout_s=_TIMEOUT_S)
        self._exchange = self._redis.register_script(_EXCHANGE)

    async def exchange(self, own: RouterLoad) -> list[RouterLoad]:
        """Tell what this router has placed, and return what the others told less than LEASE_S ago."""
        name = _name(own)
        keys = [self._keys.router_names, self._keys.router_prefix + name]
        args: list[str | bytes | int] = [
            name,
            own.SerializeToString(),
            int(LEASE_S * 1000),
            self._keys.router_prefix,
        ]
        return [RouterLoad.FromString(raw) for raw in await ask(self._exchange(keys=keys, args=args))]

    async def withdraw(self, own: RouterLoad) -> None:
        await ask(self._redis.delete(self._keys.router_prefix + _name(own)))

    async def close(self) -> None:
        await self._redis.aclose()


def _name(load: RouterLoad) -> str:
    """Return a name that two routers never share, even when their operator gave them the same one."""
    return str(incarnation_from_pb(load.router))
