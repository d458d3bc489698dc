"""What leaves behind a whole layer, as on a GPU, is what leaves before its attention."""

from __future__ import annotations

import numpy as np
import pytest

from contract.prefill_requests import MODEL, NEEDS_RECORDING
from contract.ring_ranks import Case, alone
from kvrelay.prefill_node.relay_stream import RelayStream
from oracle_data import FOLDER


@NEEDS_RECORDING
def test_the_same_rows_leave_in_either_order(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(FOLDER / MODEL, tuple(np.arange(300) % 250), chunk_tokens=128)
    before = alone(case)
    monkeypatch.setattr(RelayStream, "runs_beside", True)

    after = alone(case)

    assert after.rows.keys() == before.rows.keys()
    assert all(np.array_equal(after.rows[key], before.rows[key]) for key in before.rows)
