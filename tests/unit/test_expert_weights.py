"""An fp32 weight of a router as a sum of bf16 ones."""

from __future__ import annotations

import pytest
import torch

from kvrelay.kernels.experts_choice import bf16_parts


def a_weight() -> torch.Tensor:
    return torch.randn(8, 300, generator=torch.Generator().manual_seed(1))


def test_three_parts_are_the_weight_exactly() -> None:
    weight = torch.cat((a_weight(), a_weight() * 1e-20, a_weight() * 1e20))

    parts = bf16_parts(weight)

    assert parts is not None
    assert parts.dtype == torch.bfloat16
    assert parts.shape == (3, *weight.shape)
    assert torch.equal(parts.double().sum(0), weight.double())


def test_a_weight_that_was_bf16_is_its_only_part() -> None:
    weight = a_weight().bfloat16()

    parts = bf16_parts(weight.float())

    assert parts is not None
    assert torch.equal(parts, weight[None])


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 1.1e-38])
def test_numbers_that_parts_cannot_hold_have_none(number: float) -> None:
    weight = a_weight()
    weight[3, 5] = number

    assert bf16_parts(weight) is None
