"""What recorded decode steps and the kernels around them must do; collected for a GPU and for Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.bench.random_model import TINY, random_model
from kvrelay.core.types import SampledToken, Sampling
from kvrelay.kernels import few_tokens_choice, triton_layer
from kvrelay.kernels.grouped_experts import grouped_experts
from kvrelay.kernels.merge import merge_partials
from kvrelay.kernels.mla_decode import DecodePlan
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.decode_graphs import DecodeGraphs, StepRow, batch_sizes
from kvrelay.model.decode_step import decode_hidden
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.model.single import Session, SingleEngine
from kvrelay.model.transformer import Model

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# The interpreter computes it as well, and slowly.
SHAPE = TINY if DEVICE.type == "cuda" else replace(TINY, num_layers=2, vocab_size=64)
SETTINGS = (
    Sampling(max_tokens=9),
    Sampling(max_tokens=9, temperature=1.0, seed=4),
    Sampling(max_tokens=9, temperature=0.8, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.2, seed=5),
    Sampling(max_tokens=9, temperature=1.0, seed=3, logprobs=2),
    Sampling(max_tokens=9),
)
LENGTHS = (1, 64, 130, 200, 63)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Side:
    """One pool with the same prompts in it, and the sampler states of their rows."""

    def __init__(self, model: Model) -> None:
        self.pool = LatentPool(model.layout(block_tokens=64), 40, DEVICE)
        self.engine = SingleEngine(model, self.pool)
        self.sessions: list[Session] = []
        self.firsts: list[int] = []
        self.states: list[SamplerState] = []
        for number, (length, sampling) in enumerate(zip(LENGTHS, SETTINGS, strict=True)):
            prompt = torch.randint(
                SHAPE.vocab_size, (length,), generator=torch.Generator().manual_seed(number)
            ).tolist()
            self.sessions.append(self.engine.open(length + 12))
            self.firsts.append(int(self.engine.prefill(self.sessions[-1], prompt).argmax()))
            self.states.append(SamplerState(sampling, [*prompt, self.firsts[-1]], 1))


def step_of_reference(side: Side, rows: list[int], tokens: list[int], positions: list[int]) -> list[SampledToken]:
    """Do one step without any recorded graph: forward pass of the one-process engine, then the sampler."""
    logits = side.engine.decode_step([side.sessions[row] for row in rows], [tokens[row] for row in rows])
    chosen = sample(logits, [side.states[row] for row in rows], [positions[row] + 1 for row in rows])
    assert all(isinstance(token, SampledToken) for token in chosen)
    return [token for token in chosen if isinstance(token, SampledToken)]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the engine beside it needs its own kernels, not the interpreter's")
def test_recorded_steps_choose_what_single_steps_choose() -> None:
    model = random_model(SHAPE, DEVICE, torch.float32, seed=1)
    recorded, plain = Side(model), Side(model)
    graphs = DecodeGraphs(model, recorded.pool, max_batch=8, max_tokens=300)
    tokens, positions, rows = list(recorded.firsts), list(LENGTHS), list(range(5))
    # Some are on the device already, as when a sequence was prepared.
    tables = [one.pages.to(DEVICE) if number % 2 else one.pages for number, one in enumerate(recorded.sessions)]

    for step in range(8):
        rows = [3, 1, 2] if step == 3 else [4, 2, 3, 1] if step == 5 else rows
        found = graphs.run([StepRow(tables[row], tokens[row], positions[row], recorded.states[row]) for row in rows])
        expected = step_of_reference(plain, rows, tokens, positions)
        assert [one.token_id for one in found if isinstance(one, SampledToken)] == [one.token_id for one in expected]
        for row, token in zip(rows, expected, strict=True):
            tokens[row], positions[row] = token.token_id, positions[row] + 1
            for side in (recorded, plain):
                side.states[row].observe(token.token_id)


def test_empty_rows_of_a_step_store_nothing() -> None:
    model = random_model(SHAPE, DEVICE, torch.float32, seed=1)
    pool = LatentPool(model.layout(block_tokens=64), 4, DEVICE)
    graphs = DecodeGraphs(model, pool, max_batch=8, max_tokens=64)
    state = SamplerState(Sampling(max_tokens=2), [5])

    graphs.run([StepRow(torch.tensor([page]), 5, 0, state) for page in (3, 1, 2)])

    for layer in range(SHAPE.num_layers):
        written = pool.layer(layer).abs().sum(-1).nonzero().tolist()
        assert written == [[1, 0], [2, 0], [3, 0]]


def test_a_row_whose_logits_are_not_finite_fails_alone() -> None:
    model = random_model(SHAPE, DEVICE, torch.float32, seed=1)
    pool = LatentPool(model.layout(block_tokens=64), 4, DEVICE)
    pool.layer(0)[2] = torch.nan
    graphs = DecodeGraphs(model, pool, max_batch=2, max_tokens=64)
    state = SamplerState(Sampling(max_tokens=2), [5])

    whole, broken = graphs.run([StepRow(torch.tensor([page]), 5, 3, state) for page in (1, 2)])

    assert isinstance(whole, SampledToken)
    assert not isinstance(broken, SampledToken)


def test_numbers_drawn_ahead_are_used_for_their_own_sequence_alone() -> None:
    model = random_model(SHAPE, DEVICE, torch.float32, seed=1)
    logits, table = randn(1, SHAPE.vocab_size, seed=2), torch.tensor([1])
    graphs = [
        DecodeGraphs(model, LatentPool(model.layout(block_tokens=64), 4, DEVICE), max_batch=1, max_tokens=64)
        for _ in range(2)
    ]
    ended = SamplerState(Sampling(max_tokens=9, temperature=1.0, seed=1), [5])
    graphs[0]._prepare_next([StepRow(table, 5, 3, ended)])
    del ended

    # Python gives it the place of the one that has ended.
    begun = StepRow(table, 5, 4, SamplerState(Sampling(max_tokens=9, temperature=1.0, seed=7), [5]))
    drawn = [int(one._sample(logits, [begun])) for one in graphs]

    assert drawn[0] == drawn[1]


def test_a_step_of_few_tokens_gives_the_logits_that_the_kernels_of_batches_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(SHAPE, DEVICE, torch.float32, seed=1)
    pool = LatentPool(model.layout(block_tokens=64), 4, DEVICE)
    for layer in range(SHAPE.num_layers):
        pool.layer(layer).copy_(randn(*pool.layer(layer).shape, seed=layer))
    paged = PagedPlan.allocate(num_sequences=2, max_pages=2, page_tokens=64, device=DEVICE)
    paged.update_([torch.tensor([3, 0]), torch.tensor([1])], [70, 9])
    inputs = torch.tensor([5, 7], device=DEVICE), torch.tensor([69, 8], device=DEVICE)

    few, best, chosen = model.best(decode_hidden(model, pool, *inputs, DecodePlan.of(paged), 70))

    monkeypatch.setattr(few_tokens_choice, "MAX_TOKENS", 0)
    many, _, _ = model.best(decode_hidden(model, pool, *inputs, DecodePlan.of(paged), 70))
    torch.testing.assert_close(few, many, atol=2e-4, rtol=1e-4)
    assert torch.equal(best, few.amax(-1))
    assert torch.equal(chosen, few.argmax(-1))


def test_batch_sizes_cover_every_batch() -> None:
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert batch_sizes(9) == (1, 2, 4, 8, 16)
    assert batch_sizes(3) == (1, 2, 4)


def test_sum_and_norm_equal_torch() -> None:
    x, delta, weight = randn(5, 200, seed=1), randn(5, 200, seed=2), randn(200, seed=3)

    total, normed = triton_layer.add_rms_norm(x, delta, weight, 1e-6)

    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (200,), weight, 1e-6), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        triton_layer.rms_norm(x, weight, 1e-6), F.rms_norm(x, (200,), weight, 1e-6), atol=1e-5, rtol=0
    )


def test_merging_in_place_equals_the_plain_merge() -> None:
    a, b = randn(7, 3, 20, seed=1), randn(3, 7, 20, seed=2).transpose(0, 1)
    lse_a, lse_b = randn(7, 3, seed=3), randn(3, 7, seed=4).t()
    lse_a[2] = lse_a[4] = -torch.inf
    lse_b[3] = lse_b[4] = -torch.inf
    a[4] = b[4] = 0
    expected = merge_partials(a, lse_a, b, lse_b)

    triton_layer.merge_into(a, lse_a, b, lse_b, a, lse_a)

    torch.testing.assert_close((a, lse_a), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 20])
def test_logits_of_experts_are_the_product(tokens: int) -> None:
    x, weight = randn(tokens, 100, seed=1), randn(10, 100, seed=2)

    logits = triton_layer.router_logits(x, weight)

    torch.testing.assert_close(logits, (x.double() @ weight.double().T).float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("tokens", [3, 300])  # from 257 on in blocks
def test_experts_are_those_of_torch(tokens: int, normalise: bool) -> None:
    logits = randn(tokens, 10, seed=1)

    weights, ids = triton_layer.softmax_top(logits, top=3, scale=2.0, normalise=normalise)

    expected, expected_ids = logits.softmax(-1).topk(3)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, 2 * (expected / expected.sum(-1, keepdim=True) if normalise else expected))


def test_gate_and_combination_equal_torch() -> None:
    wide, rows, weights = randn(7, 2 * 40, seed=1), randn(12, 70, seed=2), randn(6, 2, seed=3)
    places = torch.randperm(12, generator=torch.Generator().manual_seed(4)).view(6, 2).to(DEVICE)

    torch.testing.assert_close(triton_layer.gated(wide), F.silu(wide[:, :40]) * wide[:, 40:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        triton_layer.combine(rows, places, weights), (rows[places] * weights[..., None]).sum(1), atol=1e-5, rtol=1e-5
    )
    hidden = randn(6, 70, seed=5)
    expected = hidden + (rows.view(6, 2, 70) * weights[..., None]).sum(1)
    found = triton_layer.combine(rows, None, weights, into_TD=hidden)
    assert found is hidden
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="grouped products need a GPU")
@pytest.mark.parametrize("tokens", [1, 3, 60, 300])
def test_grouped_experts_equal_each_expert_in_turn(tokens: int) -> None:
    made = randn(tokens, 64, seed=1), randn(8, 96, 64, seed=2), randn(8, 64, 48, seed=3)
    x, gate_up, down = (one.bfloat16() for one in made)
    weights = randn(tokens, 2, seed=4).softmax(-1)
    ids = randn(tokens, 8, seed=5).topk(2).indices
    ids[: tokens // 2] = ids[:1]  # more pairs of one expert than a tile takes

    found = grouped_experts(x, weights, ids, gate_up, down)

    expected = torch.zeros(tokens, 64, device=DEVICE)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            expected[token] += weight * (down[expert].float() @ (F.silu(gate) * up))
    assert (found.float() - expected).norm() < 1e-2 * expected.norm()


def test_an_empty_step_writes_no_row() -> None:
    model = random_model(SHAPE, DEVICE, torch.float32, seed=1)
    pool = LatentPool(model.layout(block_tokens=64), 8, DEVICE)
    for layer in range(pool.layout.num_layers):
        pool.layer(layer).normal_()
    before = [pool.layer(layer).clone() for layer in range(pool.layout.num_layers)]

    graphs = DecodeGraphs(model, pool, max_batch=2, max_tokens=300)
    graphs.record_all()
    told: list[str] = []
    assert graphs.run([], meanwhile=lambda: told.append("given")) == []

    assert told == ["given"]
    assert all(torch.equal(pool.layer(layer), rows) for layer, rows in enumerate(before))
