"""When a link that was given up can deliver nothing more."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.kv_transfer.link_end import LinkEnd, Sockets, unsent_sockets

A, B, C = ("here:1", "there:1"), ("here:2", "there:2"), ("here:3", "there:3")


def test_it_ends_when_each_socket_that_had_bytes_to_send_was_seen_without() -> None:
    clock, unsent = ManualClock(), [frozenset({A, B})]
    end = LinkEnd(clock, unsent=lambda: unsent[0])
    assert not end.is_over()  # the transport is still letting go

    clock.advance(1.0)
    seen = []
    for now in ({A, B}, {B, C}, {A, C}):
        unsent[0] = frozenset(now)
        seen.append(end.is_over())

    assert seen == [False, False, True]  # what C sends, and A again, came later


def test_without_unsent_bytes_it_ends_once_the_transport_has_let_go() -> None:
    clock, asked_s = ManualClock(), list[float]()

    def unsent() -> Sockets:
        asked_s.append(clock())
        return frozenset()

    end = LinkEnd(clock, unsent=unsent)
    assert not end.is_over()
    clock.advance(1.0)
    assert end.is_over()
    assert asked_s == [1.0]  # what is seen earlier may change while the endpoint is taken down


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a writer and a reader that reads nothing by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = socket.create_connection(server.getsockname())
        reader, _ = server.accept()
        with writer, reader:
            yield writer, reader


def _key(one: socket.socket) -> tuple[str, str]:
    def shown(address: tuple[str, int]) -> str:
        return socket.inet_aton(address[0])[::-1].hex().upper() + f":{address[1]:04X}"

    return shown(one.getsockname()), shown(one.getpeername())


def _drops_out(key: tuple[str, str]) -> bool:
    until_s = time.monotonic() + 10
    while key in unsent_sockets():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def test_a_closed_socket_whose_bytes_its_kernel_still_sends_counts_until_they_are_taken(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    writer, reader = connection
    key, sent, received = _key(writer), 0, 0
    writer.setblocking(False)
    try:
        while True:
            sent += writer.send(bytes(1 << 16))
    except BlockingIOError:
        writer.close()  # nobody's socket from here on
    counted = key in unsent_sockets()
    while chunk := reader.recv(1 << 16):
        received += len(chunk)

    assert counted
    assert received == sent  # delivered by the kernel, for nobody
    assert _drops_out(key)
