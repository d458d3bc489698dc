"""Connections to the index server, the names of its keys, and its errors as ours."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvrelay.core.errors import SettingsError, UnavailableError
from kvrelay.core.types import Incarnation, Role, Tier

_LETTERS = {
    (Role.PREFILL, Tier.DEVICE): b"P",
    (Role.DECODE, Tier.DEVICE): b"D",
    (Role.PREFILL, Tier.HOST): b"H",
}
_OF_LETTER = {letter: kind for kind, letter in _LETTERS.items()}
_WHO = re.compile(r"//[^/#]*@")  # user and password in a URL


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of one fleet. The hash tag keeps them on one shard of a clustered server."""

    fleet: str

    @property
    def node_names(self) -> str:
        """Set of the names of registered nodes."""
        return f"kvrelay:{{{self.fleet}}}:nodes"

    @property
    def node_prefix(self) -> str:
        """+ node name: its record; lives for one lease."""
        return f"kvrelay:{{{self.fleet}}}:node:"

    @property
    def node_life(self) -> str:
        """Made with the first node's record and never again, so that it changes when the server loses everything."""
        return f"kvrelay:{{{self.fleet}}}:life"

    @property
    def router_names(self) -> str:
        """Set of the names of the fleet's routers."""
        return f"kvrelay:{{{self.fleet}}}:routers"

    @property
    def router_prefix(self) -> str:
        """+ router name: what it has placed; lives for seconds."""
        return f"kvrelay:{{{self.fleet}}}:router:"

    @property
    def holders(self) -> str:
        """Set of the ids of everybody who holds blocks."""
        return f"kvrelay:{{{self.fleet}}}:holders"

    @property
    def changes(self) -> str:
        """Bounded stream of what holders publish and retract."""
        return f"kvrelay:{{{self.fleet}}}:changes"

    @property
    def last_change(self) -> str:
        """Number of the stream's last entry."""
        return f"kvrelay:{{{self.fleet}}}:last-change"

    @property
    def blocks_prefix(self) -> str:
        """+ holder id: set of the hashes of its blocks; lives for one lease."""
        return f"kvrelay:{{{self.fleet}}}:blocks:"


def connect(url: str, *, timeout_s: float) -> Redis:
    """Return a client; connects lazily. A broken connection is replaced once, then the error counts.

    Raises:
        SettingsError: the URL is not one of a Redis-protocol server.
    """
    try:
        return Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
        )
    except ValueError as err:
        raise SettingsError(f"index_url {without_password(url)!r}: {err}") from err


async def ask(command: Awaitable[Any]) -> Any:
    """Return the answer to a command.

    Raises:
        UnavailableError: the server did not answer, or with an error.
    """
    task = asyncio.current_task()
    assert task is not None, "called from a task"
    cancels = task.cancelling()
    try:
        answer = await command
    except (exceptions.RedisError, OSError, TimeoutError) as err:
        raise UnavailableError(f"index server: {err or type(err).__name__}") from err
    finally:
        if task.cancelling() > cancels:  # the client library swallows some cancellations
            raise asyncio.CancelledError
    return answer


async def ping(url: str, *, timeout_s: float) -> None:
    """Return when the server answers.

    Raises:
        SettingsError: the URL is not one of a Redis-protocol server.
        UnavailableError: it does not answer, or refuses; names its address and the reason.
    """
    redis = connect(url, timeout_s=timeout_s)
    try:
        await ask(redis.ping())
    except UnavailableError as err:
        raise UnavailableError(f"{without_password(url)} does not answer: {err}") from err
    finally:
        await redis.aclose()


def without_password(url: str) -> str:
    """Return a server's address as it may be shown, also one that is malformed."""
    return _WHO.sub("//", url.partition("?")[0])  # a query may hold a password too


def holder_id(node: Incarnation, role: Role, tier: Tier = Tier.DEVICE) -> bytes:
    """Return the bytes that name one tier of one life of one node in the index."""
    return _LETTERS[role, tier] + node.start_id.to_bytes(8, "big") + node.name.encode()


def holder_of(raw: bytes) -> tuple[Incarnation, Role, Tier]:
    """Undo `holder_id`."""
    return Incarnation(raw[9:].decode(), int.from_bytes(raw[1:9], "big")), *_OF_LETTER[raw[:1]]
