"""What is read out of UCX's log. The first table is one that UCX 1.23 wrote; the second is made up in its form."""

from __future__ import annotations

import logging

import pytest

from kvrelay.kv_transfer.ucx_log import Choice, Tables, is_expected

CPU = """\
  +--------+-------------+------------------------------------------+
  | prefill-0@0123456789abcdef/0 intra-node cfg#1                   |
  | remote memory write by ucp_put*(multi) from host memory to host |
  +--------+-------------+------------------------------------------+
  | Range  | Description |                  Config                  |
  +--------+-------------+------------------------------------------+
  | 0..inf | zero-copy   | cma/memory                               |
  +--------+-------------+------------------------------------------+
"""
SHORT_AND_LONG = """\
  +------------+---------------------------------------+---------------------------+
  | prefill-0@0123456789abcdef inter-node cfg#2                                    |
  | remote memory write by ucp_put*(multi) from host memory to host                |
  +------------+---------------------------------------+---------------------------+
  |    0..2047 | short                                 | rc_mlx5/mlx5_0:1          |
  | 2048..inf  | zero-copy                             | 50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1 |
  +------------+---------------------------------------+---------------------------+
"""


def choices(text: str) -> list[Choice]:
    tables = Tables()
    for line in text.splitlines():
        tables.take(line)
    return tables.choices


def test_the_transport_of_a_write_is_read_from_its_table() -> None:
    assert [(one.reach, one.route) for one in choices(CPU)] == [("intra-node", "cma/memory")]


def test_of_a_table_with_several_sizes_the_largest_counts_and_all_its_rails_are_named() -> None:
    assert choices(SHORT_AND_LONG) == [
        Choice("prefill-0@0123456789abcdef", "inter-node", "rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1")
    ]


def test_what_ucx_warns_of_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert choices("   tcp_ep.c:1 UCX  WARN  the peer went away\n  sock.c:2 UCX  DEBUG connected") == []

    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("WARNING", "UCX: the peer went away"), ("DEBUG", "UCX: connected"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "expected", "good"),
    [
        ("cma/memory", (), True),
        ("tcp/lo", (), False),
        ("cma/memory or tcp/eth0", (), False),
        ("rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1", ("rc",), True),
        ("cuda_ipc/cuda", ("rc", "cuda_ipc"), True),
        ("cma/memory", ("rc",), False),
        ("tcp/eth0", ("tcp",), True),
        ("rc_mlx5/mlx5_0:1 or tcp/eth0", ("rc",), False),
    ],
)
def test_a_route_is_expected_when_all_it_may_use_is(route: str, expected: tuple[str, ...], good: bool) -> None:
    assert is_expected(route, expected) is good
