"""Fence cells hold what was stored, wherever they live; slots are never shared."""

from __future__ import annotations

import pytest
import torch

from kvrelay.core.errors import CapacityError, TransferError
from kvrelay.kv_transfer.fence_cells import FenceMemory, FenceSlots, cell_of
from kvrelay.kv_transfer.transport import CELL_BYTES, Region
from kvrelay.kv_transfer.values import MAX_RING_SIZE


@pytest.fixture(params=["host", "tensor"])
def fences(request: pytest.FixtureRequest) -> FenceMemory:
    num_cells = 3 * MAX_RING_SIZE
    if request.param == "host":
        return FenceMemory.on_host(num_cells, num_sources=num_cells)
    return FenceMemory.in_tensor(torch.zeros(num_cells, dtype=torch.int64), num_sources=num_cells)


def write(region: Region, at: int, value: int) -> None:
    """Do what a transport does."""
    region.view()[at * CELL_BYTES : (at + 1) * CELL_BYTES] = value.to_bytes(CELL_BYTES, "little")


def test_a_cell_holds_what_a_peer_writes_at_its_place(fences: FenceMemory) -> None:
    write(fences.cells.region, cell_of(1, 7), 77)

    assert FenceSlots(fences.cells).written(1, 7) == 77
    assert sum(fences.cells.load(cell) for cell in range(fences.cells.num_cells)) == 77


def test_no_number_of_our_own_fences_shows_in_a_cell_or_wipes_one_out(fences: FenceMemory) -> None:
    """A node that is written to and writes, as one that pulls or is pulled from, has both kinds at once."""
    for cell in range(fences.cells.num_cells):
        write(fences.cells.region, cell, 1000 + cell)

    sources = [fences.sources.take(5) for _ in range(fences.sources.num_sources)]

    assert len(set(sources)) == fences.sources.num_sources == fences.cells.num_cells
    assert [fences.cells.load(cell) - 1000 for cell in range(fences.cells.num_cells)] == list(
        range(fences.cells.num_cells)
    )
    assert {bytes(fences.sources.region.view())} == {(5).to_bytes(CELL_BYTES, "little") * len(sources)}


def test_a_source_is_used_again_as_late_as_possible(fences: FenceMemory) -> None:
    """What a failed fence may still read keeps its number for long."""
    first = fences.sources.take(1)
    fences.sources.give_back(first)

    taken = [fences.sources.take(2) for _ in range(fences.sources.num_sources)]

    assert taken[-1] == first
    with pytest.raises(TransferError, match="all 192 fence sources are in use"):
        fences.sources.take(3)


def test_no_slot_is_taken_twice_and_the_last_one_is_the_limit(fences: FenceMemory) -> None:
    slots = FenceSlots(fences.cells)
    assert {slots.take() for _ in range(3)} == {0, 1, 2}

    with pytest.raises(CapacityError, match="all 3 fence slots"):
        slots.take()

    slots.give_back(1)
    assert slots.take() == 1
