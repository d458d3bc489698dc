"""Fence cells hold what was stored, wherever they live; slots are never shared."""

from __future__ import annotations

import pytest
import torch

from kvrelay.core.errors import CapacityError
from kvrelay.kv_transfer.fence_cells import FenceSlots, HostCells, TensorCells, cell_of
from kvrelay.kv_transfer.transport import CELL_BYTES, Cells
from kvrelay.kv_transfer.values import MAX_RING_SIZE


@pytest.fixture(params=["host", "tensor"])
def cells(request: pytest.FixtureRequest) -> Cells:
    if request.param == "host":
        return HostCells(3 * MAX_RING_SIZE)
    return TensorCells(torch.zeros(3 * MAX_RING_SIZE, dtype=torch.int64))


def test_a_cell_holds_what_a_peer_writes_at_its_place(cells: Cells) -> None:
    cells.store(5, 123)
    at = cell_of(1, 7) * CELL_BYTES
    cells.region.view()[at : at + CELL_BYTES] = (77).to_bytes(CELL_BYTES, "little")

    assert cells.load(5) == 123
    assert FenceSlots(cells).written(1, 7) == 77
    assert cells.load(0) == 0


def test_no_slot_is_taken_twice_and_the_last_one_is_the_limit(cells: Cells) -> None:
    slots = FenceSlots(cells)
    assert {slots.take() for _ in range(3)} == {0, 1, 2}

    with pytest.raises(CapacityError, match="all 3 fence slots"):
        slots.take()

    slots.give_back(1)
    assert slots.take() == 1
