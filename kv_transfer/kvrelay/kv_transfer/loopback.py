"""The data plane over plain TCP on this machine: host memory only, no NIXL.

It keeps the hard properties of the real one, so that the same tests run on both: the target's own polling drains its
sockets (a dead writer's last bytes still land), a notice follows the data of its write, a write in flight can neither
be refused nor recalled, and nothing moves unless somebody polls. It listens on 127.0.0.1 without authentication.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from kvrelay.core.errors import InvalidRequestError, TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import (
    CELL_BYTES,
    PENDING,
    Address,
    Done,
    Failed,
    Handle,
    Progress,
    Region,
    digest,
)

NAME = "loopback"
_HELLO = struct.Struct("<I")  # length of the agent name that follows
_WRITE = struct.Struct("<QBII")  # sequence number, is a fence, copies, length of the notice
_PIECE = struct.Struct("<QQ")  # offset in the target's region, bytes
_ACK = struct.Struct("<Q")  # sequence number
_CONNECT_TIMEOUT_S = 5.0
_MOST_BYTES_PER_CALL = 64 << 20  # so that one busy writer does not keep the thread
_SOCKET_ERRORS = (ConnectionError, TimeoutError, OSError)


@dataclass(slots=True)
class _Write:
    peer: str
    sequence: int
    num_bytes: int
    is_fence: bool
    progress: Progress = PENDING


@dataclass(slots=True)
class _Outgoing:
    """Our connection to one peer, as its writer."""

    sock: socket.socket
    address: Address
    outbox: deque[memoryview] = field(default_factory=deque)
    in_flight: dict[int, _Write] = field(default_factory=dict)
    acks: bytearray = field(default_factory=bytearray)
    failure: str | None = None


class _Incoming:
    """One writer's connection to us: a script that says which bytes of memory to fill next."""

    def __init__(self, sock: socket.socket, regions: tuple[memoryview, memoryview]) -> None:
        self.sock = sock
        self.notices: list[tuple[str, bytes]] = []
        self.acks = bytearray()
        self._regions = regions
        self._script = self._read()
        self._want = next(self._script)

    def progress(self) -> None:
        """Take what is there and acknowledge what is complete; raises one of the socket errors when it is over."""
        taken = 0
        try:
            while taken < _MOST_BYTES_PER_CALL:
                received = self.sock.recv_into(self._want)
                if received == 0:
                    raise ConnectionError("the writer has gone")
                taken += received
                self._want = self._want[received:]
                while not len(self._want):
                    self._want = next(self._script)
        except BlockingIOError:
            pass
        self._acknowledge()

    def _acknowledge(self) -> None:
        try:
            while self.acks:
                del self.acks[: self.sock.send(self.acks)]
        except BlockingIOError:
            pass

    def _read(self) -> Generator[memoryview, None, None]:
        head = bytearray(_HELLO.size)
        yield memoryview(head)
        name = bytearray(_HELLO.unpack(head)[0])
        yield memoryview(name)
        while True:
            head = bytearray(_WRITE.size)
            yield memoryview(head)
            sequence, is_fence, num_copies, notice_bytes = _WRITE.unpack(head)
            table = bytearray(_PIECE.size * num_copies)
            yield memoryview(table)
            notice = bytearray(notice_bytes)
            yield memoryview(notice)
            region = self._regions[is_fence]
            for offset, num_bytes in _PIECE.iter_unpack(table):
                if offset + num_bytes > len(region):
                    raise ConnectionError(f"a write of {num_bytes} bytes at {offset} of a region of {len(region)}")
                yield region[offset : offset + num_bytes]
            if notice:
                self.notices.append((name.decode(), bytes(notice)))
            self.acks += _ACK.pack(sequence)


class LoopbackTransport:
    """One agent over one pool and one region of fence cells, both in host memory."""

    name = NAME

    def __init__(
        self, *, agent_name: str, pool: Region, pool_pages: int, fences: FenceMemory, counters: Counters
    ) -> None:
        self._name = agent_name
        self._counters = counters
        self._pool, self._fences = pool.view(), fences  # which must stay mapped
        self._regions = (self._pool, fences.cells.region.view())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: list[_Incoming] = []
        self._next_sequence = 0
        metadata = "{}:{}".format(*self._listener.getsockname()).encode()
        self._address = Address(NAME, agent_name, metadata, digest(metadata), pool, pool_pages, fences.cells.region)

    def address(self) -> Address:
        return self._address

    def connect(self, address: Address) -> str:
        address.check(transport=NAME)
        known = self._outgoing.get(address.agent_name)
        if known is not None and known.address == address and known.failure is None:
            return address.agent_name
        self.disconnect(address.agent_name)
        host, _, port = address.metadata.decode().rpartition(":")
        if not port.isdigit():
            raise InvalidRequestError(f"{address.metadata!r} is no host and port")
        try:
            sock = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
        except _SOCKET_ERRORS as err:
            raise TransferError(f"cannot reach agent {address.agent_name}: {err}") from err
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = self._outgoing[address.agent_name] = _Outgoing(sock, address)
        name = self._name.encode()
        peer.outbox.append(memoryview(_HELLO.pack(len(name)) + name))
        return address.agent_name

    def route(self, peer: str) -> str:
        return "sockets/lo"

    def scatters(self, peer: str) -> bool:
        return False

    def disconnect(self, peer: str) -> None:
        gone = self._outgoing.pop(peer, None)
        if gone is not None:
            _fail(gone, "disconnected")
            gone.sock.close()

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        pieces = [self._pool[c.src_offset_bytes : c.src_offset_bytes + c.num_bytes] for c in copies]
        return self._start(peer, [c.dst_offset_bytes for c in copies], pieces, notice, is_fence=False)

    def write_fence(self, peer: str, cell: int, value: int) -> Handle:
        raw = memoryview(value.to_bytes(CELL_BYTES, "little"))
        return self._start(peer, [cell * CELL_BYTES], [raw], b"", is_fence=True)

    def poll(self, handle: Handle) -> Progress:
        assert isinstance(handle, _Write)
        if handle.progress is PENDING and handle.peer in self._outgoing:
            self._flush(self._outgoing[handle.peer])
        return handle.progress

    def notices(self) -> list[tuple[str, bytes]]:
        self._accept()
        found: list[tuple[str, bytes]] = []
        for source in list(self._incoming):
            try:
                source.progress()
            except _SOCKET_ERRORS:
                source.sock.close()
                self._incoming.remove(source)
            found += source.notices
            source.notices = []
        return found

    def release(self, handle: Handle) -> None:
        assert isinstance(handle, _Write)
        assert handle.progress is not PENDING, "only ended writes are released"

    def close(self) -> None:
        for peer in list(self._outgoing):
            self.disconnect(peer)
        for source in self._incoming:
            source.sock.close()
        self._listener.close()

    def _start(
        self, peer: str, offsets: list[int], pieces: list[memoryview], notice: bytes, *, is_fence: bool
    ) -> _Write:
        to = self._outgoing.get(peer)
        if to is None:
            raise TransferError(f"agent {peer} is not connected")
        if to.failure is not None:
            raise TransferError(f"agent {peer}: {to.failure}")
        sequence = self._next_sequence
        self._next_sequence += 1
        table = b"".join(_PIECE.pack(at, len(piece)) for at, piece in zip(offsets, pieces, strict=True))
        to.outbox.append(memoryview(_WRITE.pack(sequence, is_fence, len(pieces), len(notice)) + table + notice))
        to.outbox.extend(pieces)
        write = to.in_flight[sequence] = _Write(peer, sequence, sum(map(len, pieces)), is_fence)
        self._flush(to)
        return write

    def _flush(self, to: _Outgoing) -> None:
        """Send what the socket takes and read the acknowledgements."""
        try:
            while to.outbox:
                sent = to.sock.send(to.outbox[0])
                to.outbox[0] = to.outbox[0][sent:]
                if not len(to.outbox[0]):
                    to.outbox.popleft()
        except BlockingIOError:
            pass
        except _SOCKET_ERRORS as err:
            _fail(to, f"connection lost: {err}")
        self._take_acks(to)

    def _take_acks(self, to: _Outgoing) -> None:
        try:
            while to.failure is None:
                raw = to.sock.recv(4096)
                if not raw:
                    _fail(to, "connection lost")
                to.acks += raw
        except BlockingIOError:
            pass
        except _SOCKET_ERRORS as err:
            _fail(to, f"connection lost: {err}")
        whole = len(to.acks) // _ACK.size * _ACK.size
        for (sequence,) in _ACK.iter_unpack(bytes(to.acks[:whole])):
            write = to.in_flight.pop(sequence, None)
            if write is not None:
                write.progress = Done(write.num_bytes)
                if not write.is_fence:
                    self._counters.add("loopback_bytes_total", write.num_bytes)
        del to.acks[:whole]

    def _accept(self) -> None:
        try:
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._incoming.append(_Incoming(sock, self._regions))
        except BlockingIOError:
            pass


def _fail(to: _Outgoing, reason: str) -> None:
    to.failure = reason
    to.outbox.clear()
    for write in to.in_flight.values():
        write.progress = Failed(f"a write to {write.peer} failed: {reason}")
    to.in_flight.clear()
