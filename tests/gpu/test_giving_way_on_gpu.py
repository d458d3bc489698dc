"""A chunk that is paused between any two layers goes on as if nothing had been, on a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from contract.ring_ranks import launch
from contract.scripted_pauses import Scene
from contract.test_giving_way import LONG, a_case, num_layers
from contract.test_ring import rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]


def test_a_paused_chunk_gives_the_same_rows_and_tokens() -> None:
    everywhere = [Scene(chunk, layer) for chunk in range(3) for layer in range(num_layers())]
    for_others = [Scene(0, 2, "pause for the next"), Scene(2, 1, "pause for the next")]
    cases = [
        dataclasses.replace(case, chunk_tokens=128, align_tokens=64)
        for case in (
            a_case(),
            a_case(*everywhere),
            a_case(*for_others, beside=2),
            a_case(Scene(1, 1, "pause and cancel")),
        )
    ]

    undisturbed, *paused, cancelled = launch(cases, 1, device_type="cuda")

    for found in paused:
        assert np.array_equal(rows_of(found, 0, LONG), rows_of(undisturbed, 0, LONG))
        assert found[0].token == undisturbed[0].token
    assert (cancelled[0].error, cancelled[0].held) == ("not wanted any more", (0, 0))
