"""What an endpoint knows about its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.layout import PageLayout
from kvrelay.kv_transfer.values import ChecksumKind
from kvrelay.proto.tls import Tls

Checksum = Callable[[Sequence[tuple[int, int]]], int]  # of (offset_bytes, num_bytes) pieces, in order

# Starts a checksum behind the device work that the calling thread has launched; the returned call waits for it.
StartChecksum = Callable[[Sequence[tuple[int, int]]], Callable[[], int]]


@dataclass(frozen=True, slots=True)
class DeviceSums:
    """How checksums of rows that a device is still computing are had without stopping the thread that launches it."""

    start: StartChecksum
    waiter: Executor  # of one thread: what waits there ends in the order it was given


@dataclass(frozen=True, slots=True)
class LocalPool:
    """The latent pool of this process, as bytes."""

    layout: PageLayout
    num_pages: int  # per layer
    checksum: Checksum  # over this pool; any thread may call it
    device_sums: DeviceSums | None = None  # None where rows are final as soon as they are there
    kind: ChecksumKind = ChecksumKind.XXH3  # of both; asked of those who write here
    others: tuple[LocalPool, ...] = ()  # the same pool with checksums of other kinds
    device: bytes = b""  # UUID of its GPU; empty: none

    def summing(self, kind: ChecksumKind) -> LocalPool:
        """Return this pool with checksums of a kind.

        Raises:
            InvalidRequestError: it has none of that kind.
        """
        for pool in (self, *self.others):
            if pool.kind is kind:
                return pool
        raise InvalidRequestError(f"checksums of kind {kind.value} are wanted; this pool has none")


@dataclass(frozen=True, slots=True)
class Limits:
    fence_timeout_s: float = 10.0  # pages whose fence is later than this are quarantined
    drain_s: float = 1.0  # polling after a writer's death, before its pages go back
    max_message_bytes: int = 32 << 20
    tls: Tls | None = None  # of the channels to decode nodes
