"""What a node says of the page that it has relayed to itself."""

from __future__ import annotations

import logging

import pytest

from kvrelay.kv_transfer.pool_agent import _say_own_route


@pytest.mark.parametrize(
    ("route", "expected", "on_device", "level"),
    [
        ("sysv/memory", (), False, logging.INFO),
        ("tcp/lo", (), False, logging.WARNING),
        ("tcp/lo", ("tcp",), False, logging.INFO),
        ("tcp/lo", (), True, logging.INFO),
    ],
)
def test_tcp_is_warned_of_where_it_says_something_of_peers(
    route: str, expected: tuple[str, ...], on_device: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        _say_own_route("n@1/0", route, expected, on_device=on_device)

    (record,) = caplog.records
    assert record.levelno == level
    assert route in record.message
