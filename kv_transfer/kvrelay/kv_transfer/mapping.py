"""What an agent's address says of its pool's device memory to writers in other processes of the same host."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from kvrelay.core.errors import TransferError

_VERSION = 2  # who offers one also takes notices in bundles
_FORMAT = struct.Struct("<H16s80sQ")  # the version, then the fields
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A handle that other processes open, and where the pool begins in the allocation that it stands for."""

    boot_id: bytes  # 16: of the host, from its start to its end
    handle: bytes  # 80: of the driver, and the name of the device
    offset_bytes: int

    def encode(self) -> bytes:
        return _FORMAT.pack(_VERSION, self.boot_id, self.handle, self.offset_bytes)

    @classmethod
    def decode(cls, blob: bytes) -> Self:
        """Return what `encode` was given.

        Raises:
            TransferError: there is none, it is of a version that is unknown here or of another host, or it cannot be
                said of which.
        """
        if not blob:
            raise TransferError("it offers no mapping of its pool")
        version, *fields = _FORMAT.unpack(blob) if len(blob) == _FORMAT.size else (None,)
        if version != _VERSION:
            raise TransferError(f"{len(blob)} bytes are no mapping of version {_VERSION}")
        found = cls(*fields)
        if found.boot_id != boot_id():
            raise TransferError("it is on another host, or was before this one was started again")
        return found


@cache
def boot_id() -> bytes:
    """Return 16 bytes that all processes of this host share, also those in containers, until it is started again.

    Raises:
        TransferError: the kernel does not say, as in some sandboxes.
    """
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError) as err:
        raise TransferError(f"this host does not say which one it is: {err}") from err
