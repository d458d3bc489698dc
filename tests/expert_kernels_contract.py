"""What the kernels around products of experts must give, on GPUs or in Triton's interpreter; see kernel_contract.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_contract import DEVICE, ON_GPU, randn
from kvrelay.kernels import experts_choice, triton_layer
from kvrelay.kernels.grouped_experts import grouped_experts
from kvrelay.kernels.triton_order import expert_order, spread
from kvrelay.kernels.triton_router import logits_of_parts

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="grouped products need a GPU")


def on_device(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return randn(*shape, dtype=dtype, seed=seed).to(DEVICE)


def chosen(tokens: int, experts: int, top: int) -> Tensor:
    ids = on_device(tokens, experts, seed=tokens).topk(top).indices
    ids[: tokens // 3] = ids[:1]  # many pairs of a few experts, and some experts of none
    return ids


@pytest.mark.parametrize(("tokens", "experts", "top"), [(1, 8, 2), (77, 5, 3), (700, 64, 6), (300, 160, 8)])
def test_pairs_lie_in_the_order_of_a_stable_sort(tokens: int, experts: int, top: int) -> None:
    ids = chosen(tokens, experts, top)

    order = expert_order(ids, experts)

    expected = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=experts)
    assert torch.equal(order.tokens_A, (expected // top).int())
    assert torch.equal(order.places_TK.flatten()[expected], torch.arange(tokens * top, device=DEVICE).int())
    assert torch.equal(order.bounds_E1, F.pad(counts.cumsum(0), (1, 0)).int())


@pytest.mark.parametrize("width", [64, 200])
def test_each_row_is_that_of_its_token(width: int) -> None:
    x, ids = on_device(50, width, seed=1), chosen(50, 8, 3)
    order = expert_order(ids, 8)

    assert torch.equal(spread(x, order), x[order.tokens_A.long()])


@pytest.mark.parametrize("adds", [False, True])
def test_a_combination_takes_more_rows_and_what_is_there(adds: bool) -> None:
    rows, weights, more, into = (on_device(*shape, seed=2) for shape in ((12, 70), (6, 2), (6, 70), (6, 70)))
    places = torch.randperm(12, generator=torch.Generator().manual_seed(4)).view(6, 2).to(DEVICE)
    expected = (rows[places] * weights[..., None]).sum(1) + more + (into if adds else 0)

    found = triton_layer.combine(rows, places.int(), weights, more_TD=more, into_TD=into if adds else None)

    assert (found.data_ptr() == into.data_ptr()) is adds
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@needs_gpu
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("tokens", [1, 60, 1500, 4500])  # from 4,096 on by QuACK, where it is installed
def test_experts_for_every_token_may_stand_apart(tokens: int, adds: bool) -> None:
    x, gate_up, down, into = (
        on_device(*shape, seed=3, dtype=torch.bfloat16)
        for shape in ((tokens, 64), (10, 96, 64), (10, 64, 48), (tokens, 64))
    )
    weights, ids = on_device(tokens, 2, seed=4).softmax(-1), chosen(tokens, 8, 2)
    gate, up = torch.einsum("eid,td->tei", gate_up.float(), x.float()).chunk(2, -1)
    each = torch.einsum("edi,tei->ted", down.float(), F.silu(gate) * up)
    expected = (each.gather(1, ids[..., None].expand(-1, -1, 64)) * weights[..., None]).sum(1) + each[:, 8:].sum(1)
    expected += into.float() if adds else 0

    beside = down[8:].transpose(0, 1).flatten(1).contiguous()
    found = grouped_experts(x, weights, ids, gate_up, down, down_apart_DX=beside, into_TD=into if adds else None)

    assert (found.float() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize(("tokens", "width", "experts"), [(70, 200, 10), (300, 2048, 64), (130, 256, 100)])
@pytest.mark.parametrize("parts", [1, 3])
def test_logits_on_matrix_units_are_as_exact_as_in_fp32(tokens: int, width: int, experts: int, parts: int) -> None:
    x, weight = on_device(tokens, width, seed=1, dtype=torch.bfloat16), on_device(experts, width, seed=2) / 45
    if parts == 1:
        weight = weight.bfloat16().float()
    split = experts_choice.bf16_parts(weight)
    assert split is not None
    assert len(split) == parts

    found = logits_of_parts(x, split) if ON_GPU else logits_of_parts(x.float(), split.float())  # it knows no bf16

    exact = x.double() @ weight.double().T
    assert (found - exact).norm() <= (F.linear(x.float(), weight) - exact).norm() + 1e-7 * exact.norm()
