"""`kvrelay nodes` shows what can be typed in again."""

from __future__ import annotations

import pytest

from kvrelay.cli import fleet
from kvrelay.proto.v1 import common_pb2, fleet_pb2


def test_no_name_address_or_count_is_cut_in_a_narrow_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name, endpoint = "decode-" + "long-host-name-" * 4 + "0", "a-host.of-a.domain-with.many-parts:33627"
    record = fleet_pb2.NodeRecord(
        node=common_pb2.Incarnation(name=name, start_id=1),
        role=fleet_pb2.NODE_ROLE_DECODE,
        endpoint=endpoint,
        model="embedded",
        total_pages=2048,
        free_pages=2047,
    )

    fleet._print_table([fleet.as_dict(record)])
    head, row = capsys.readouterr().out.splitlines()

    assert "pages free" in head
    assert {name, endpoint, "2047/2048"} <= set(row.split())


def test_what_a_node_relays_over_is_shown_and_a_route_that_is_not_expected_is_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    links = [
        fleet_pb2.Link(peer="decode-0", bytes_per_s=3.25e9, route="rc_mlx5/mlx5_0:1"),
        fleet_pb2.Link(peer="decode-1", route="tcp/eth0", is_unexpected=True),
        fleet_pb2.Link(peer="decode-2"),
    ]
    record = fleet_pb2.NodeRecord(node=common_pb2.Incarnation(name="p"), role=fleet_pb2.NODE_ROLE_PREFILL, links=links)

    shown = fleet.as_dict(record)
    fleet._print_table([shown])

    assert shown["links_over"] == {"decode-0": "rc_mlx5/mlx5_0:1", "decode-1": "tcp/eth0", "decode-2": ""}
    assert shown["links_unexpected"] == ["decode-1"]
    assert "rc_mlx5/mlx5_0:1, tcp/eth0 !" in capsys.readouterr().out
