"""A node relays a page to itself before it serves: every transport can, and one that does it wrong is found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import faulty_transport as faulty
from faulty_transport import FaultyTransport
from kvrelay.core.errors import TransferError
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.fence_cells import FenceMemory
from kvrelay.kv_transfer.self_relay import prove_relay
from kvrelay.kv_transfer.transport import Region, Transport
from kvrelay.kvcache.pool import LatentPool
from transport_party import KINDS, new_transport

LAYOUT = PageLayout(num_layers=3, latent_width=32, rope_width=16, dtype="float32", model_id="m")


@contextmanager
def agent(kind: str) -> Iterator[tuple[Transport, LatentPool]]:
    pool = LatentPool(LAYOUT, 4, torch.device("cpu"))
    transport = new_transport(
        kind, name=f"self/{kind}", pool=Region(pool.address, pool.num_bytes), pool_pages=4,
        fences=FenceMemory.on_host(8), counters=Counters(),
    )  # fmt: skip
    try:
        yield transport, pool
    finally:
        transport.close()


@pytest.mark.parametrize("kind", ["loopback", "nixl"])
def test_a_page_is_relayed_to_its_own_node_and_leaves_nothing_behind(kind: str) -> None:
    assert kind in KINDS
    with agent(kind) as (transport, pool):
        prove_relay(transport, pool)
        prove_relay(transport, pool)  # nothing of the first time is in its way
        assert not any(pool.memory())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (faulty.truncate, "other bytes landed"),
        (faulty.refuse, "no such route"),
        (faulty.garble_any, "heard"),
    ],
)
def test_a_transport_that_relays_wrongly_is_found_out(fault: faulty.Fault, said: str) -> None:
    with agent("loopback") as (transport, pool), pytest.raises(TransferError, match=said):
        prove_relay(FaultyTransport(transport, fault, from_write=0), pool)


def test_a_write_that_never_ends_is_waited_for_in_bounds() -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    with agent("loopback") as (transport, pool), pytest.raises(TransferError, match="within 20 s"):
        prove_relay(FaultyTransport(transport, faulty.freeze, from_write=0), pool, clock=clock)
