"""What the kernels for few tokens must give, on a GPU or in Triton's interpreter; see kernel_contract.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_contract import DEVICE, ON_GPU, randn
from kvrelay.kernels import few_tokens
from kvrelay.kernels.few_tokens import Experts
from kvrelay.kernels.residual_norm import Norm
from kvrelay.kernels.rope import Rope, apply_rope
from kvrelay.kernels.rope_spec import RopeKind, RopeSpec
from kvrelay.kernels.triton_rows import write_rows

# The interpreter cuts bf16 off instead of rounding it.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
EPS = 1e-6
TOLERANCE = 6e-3 if ON_GPU else 1e-5


def on_device(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return randn(*shape, dtype=dtype, seed=seed).to(DEVICE)


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], norm.float(), EPS).to(DTYPE)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal up to what rounding on the way may do."""
    assert found.shape == expected.shape
    assert not found.isnan().any()
    assert (found.float() - expected.float()).norm() <= TOLERANCE * expected.float().norm()


def nobody_yet(tokens: int) -> Tensor:
    return torch.zeros(tokens, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("width", "rows"), [(64, 100), (200, 33)])
def test_a_product_with_a_norm_before_and_a_sum_behind(tokens: int, width: int, rows: int) -> None:
    wide = on_device(tokens, width + 8, seed=1)
    x, weight, norm = wide[:, :width], on_device(rows, width, seed=2), on_device(width, seed=3)
    add = on_device(tokens, rows, seed=4)

    close(few_tokens.linear(x, weight), x.float() @ weight.float().T)
    cleared = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    both = few_tokens.linear(x, weight, norm=Norm(norm, EPS), add_TO=add, clears_T=cleared)
    assert not cleared.any()
    close(both, add.float() + normed(x, norm).float() @ weight.float().T)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.skipif(not ON_GPU, reason="bf16"))])
def test_queries_are_absorbed_and_rows_stored_as_by_the_single_kernels(packed: bool) -> None:
    tokens, heads, nope, rope, latent = 3, 4, 24, 16, 48
    q, mixed = on_device(tokens, heads * (nope + rope), seed=1), on_device(tokens, latent + rope, seed=2)
    up = on_device(heads, nope + 20, latent, seed=3)[:, :nope]
    norm = on_device(latent, seed=4)
    tables = Rope(RopeSpec(kind=RopeKind.DEFAULT, width=rope, theta=1e4), DEVICE).tables(
        torch.arange(70, 70 + tokens, device=DEVICE), 0
    )
    slots = torch.tensor([5, -1, 0], device=DEVICE)
    shape, dtype = ((8, latent + 4 + 2 * rope), torch.uint8) if packed else ((8, latent + rope), DTYPE)
    pool, expected_pool = (torch.full(shape, 7, dtype=dtype, device=DEVICE) for _ in range(2))
    parts = mixed[:, :latent], mixed[:, latent:]

    found = few_tokens.absorb_and_store(
        q, *parts, key_up_NPC=up, norm=Norm(norm, EPS), tables=tables, slots_T=slots, pool=pool
    )

    write_rows(*parts, norm_C=norm, eps=EPS, tables=tables, slots_T=slots, pool=expected_pool)
    assert torch.equal(pool, expected_pool)
    q_TNK = q.view(tokens, heads, nope + rope)
    close(found[..., :latent], torch.einsum("tnp,npc->tnc", q_TNK[..., :nope].float(), up.float()))
    close(found[..., latent:], apply_rope(q_TNK[..., nope:], tables))


def test_values_of_latent_outputs() -> None:
    out = on_device(3, 4, 48, seed=1, dtype=torch.float32)
    up = on_device(4, 44, 48, seed=2)[:, 24:].transpose(1, 2)

    found = few_tokens.unabsorb(out, up, DTYPE)

    close(found, torch.einsum("tnc,ncv->tnv", out.to(DTYPE).float(), up.float()).flatten(1))


@pytest.mark.parametrize(
    ("tokens", "normalise", "always"),
    [
        (1, False, 0),
        (1, True, 2),
        (3 if ON_GPU else 2, True, 0),
        *([(1, False, 2), (1, True, 0), (3, False, 2)] if ON_GPU else []),
    ],
)  # the interpreter takes seconds for each
def test_experts_of_few_tokens_equal_each_expert_in_turn(tokens: int, normalise: bool, always: int) -> None:
    hidden, width, experts, top = 64, 40, 10, 3
    x, norm = on_device(tokens, hidden, seed=1), on_device(hidden, seed=2)
    router = on_device(experts, hidden, seed=3, dtype=torch.float32)
    gate_up = on_device(experts + always, 2 * width, hidden, seed=4)
    down = on_device(experts + always, hidden, width, seed=5)

    found = few_tokens.add_experts(
        x, Norm(norm, EPS), Experts(router, gate_up, down, top=top, scale=1.5, normalise=normalise), nobody_yet(tokens)
    )

    expected = x.float()
    for token, row in enumerate(normed(x, norm).float()):
        weights, ids = (router @ row).softmax(-1).topk(top)
        weights = 1.5 * (weights / weights.sum() if normalise else weights)
        chosen = [*zip(weights.tolist(), ids.tolist(), strict=True), *((1.0, experts + one) for one in range(always))]
        for weight, expert in chosen:
            gate, up = (gate_up[expert].float() @ row).to(DTYPE).float().chunk(2)
            expected[token] += weight * (down[expert].float() @ (F.silu(gate) * up).to(DTYPE).float())
    close(found, expected)


def test_a_token_that_is_not_a_number_stays_within_the_experts() -> None:
    x, norm = on_device(1, 64, seed=1), on_device(64, seed=2)
    x[0, 3] = torch.nan
    router = on_device(10, 64, seed=3, dtype=torch.float32)
    gate_up, down = on_device(10, 80, 64, seed=4), on_device(10, 64, 40, seed=5)

    found = few_tokens.add_experts(x, Norm(norm, EPS), Experts(router, gate_up, down, top=3), nobody_yet(1))

    assert found.isnan().all()


def test_a_gated_mlp_of_few_tokens() -> None:
    x, norm = on_device(2, 64, seed=1), on_device(64, seed=2)
    gate_up, down = on_device(2 * 100, 64, seed=3), on_device(64, 100, seed=4)

    found = few_tokens.add_experts(x, Norm(norm, EPS), Experts(None, gate_up[None], down[None]), nobody_yet(2))

    gate, up = (normed(x, norm).float() @ gate_up.float().T).to(DTYPE).float().chunk(2, -1)
    close(found, x.float() + (F.silu(gate) * up).to(DTYPE).float() @ down.float().T)


def test_logits_and_the_best_of_them() -> None:
    x, norm, weight = on_device(3, 64, seed=1), on_device(64, seed=2), on_device(1000, 64, seed=3)
    weight[700] = weight[20]

    logits, best, chosen = few_tokens.head(x, Norm(norm, EPS), weight)

    close(logits, normed(x, norm).float() @ weight.float().T)
    assert torch.equal(best, logits.amax(-1))
    assert chosen.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    x[1, 0] = torch.nan
    _, best, _ = few_tokens.head(x, Norm(norm, EPS), weight)
    assert best.isfinite().tolist() == [True, False, True]
