"""What a process tells others about where it is."""

from __future__ import annotations

import socket

from kvrelay.core.address import advertised
from kvrelay.core.lifecycle import new_incarnation

INDEX = "redis://127.0.0.1:6379/0"


def test_a_bound_address_is_told_as_it_is() -> None:
    assert advertised(bound="10.1.2.3:8401", advertise="", index_url=INDEX) == "10.1.2.3:8401"


def test_what_the_operator_says_comes_first() -> None:
    assert advertised(bound="0.0.0.0:8401", advertise="node-7:8401", index_url=INDEX) == "node-7:8401"


def test_one_that_listens_everywhere_tells_the_interface_that_leads_to_the_index() -> None:
    assert advertised(bound="0.0.0.0:8401", advertise="", index_url=INDEX) == "127.0.0.1:8401"


def test_without_an_index_host_that_resolves_it_tells_loopback() -> None:
    url = "redis://no-such-host.invalid:6379/0"

    assert advertised(bound="0.0.0.0:8401", advertise="", index_url=url) == "127.0.0.1:8401"


def test_a_name_may_take_in_the_host_so_that_it_outlives_a_restart() -> None:
    assert new_incarnation("decode-{host}", "decode").name == f"decode-{socket.gethostname()}"
