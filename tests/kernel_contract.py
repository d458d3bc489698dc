"""What every decode kernel must give, on a GPU or in Triton's interpreter; kernel_contract_rows.py has the others.

Both are collected by tests/gpu/test_kernels.py on a device, and by tests/unit/test_kernel_contract.py in a process of
their own with TRITON_INTERPRET=1. Results are compared with the reference over the same rounded inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvrelay.core.errors import CapacityError, NoKernelError
from kvrelay.kernels import mla_decode, quant, reference
from kvrelay.kernels.dispatch import choose
from kvrelay.kernels.mla_decode import DecodePlan, MlaDecode, Problem
from kvrelay.kernels.paged_plan import PagedPlan

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Weights are rounded to the pool's dtype before they meet the values; the interpreter widens them instead.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LENGTHS = [[1], [16], [700], [5, 300, 17, 64], [700, 3, 3, 3, 400], [64] * 8]
SHAPES = [(4, 32, 16, 16), (4, 32, 16, 64), (20, 48, 24, 64)]  # heads, latent, rope, page
# By default a third of them, in which each length, each type and each shape meets each of the others.
SMALL_CASES = [
    pytest.param(
        *shape, lengths, dtype, id=f"{shape[0]}-{shape[3]}-{len(lengths)}x{max(lengths)}-{dtype}",
        marks=[pytest.mark.full] if (i + j + k) % 3 else [],
    )
    for i, shape in enumerate(SHAPES)
    for j, lengths in enumerate(LENGTHS)
    for k, dtype in enumerate(TOLERANCE)
]  # fmt: skip


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Batch:
    q: Tensor
    pool: Tensor  # rows that belong to nobody are not-a-number
    tables: list[Tensor]
    lengths: list[int]
    latent: int

    def expected(self) -> Tensor:
        """Return the reference's answers; zeros where there is no sequence."""
        out = torch.zeros(*self.q.shape[:2], self.latent)
        here = [row for row, length in enumerate(self.lengths) if length]
        tables, lengths = [self.tables[row].tolist() for row in here], [self.lengths[row] for row in here]
        out[here] = reference.mla_decode(
            self.q[here].cpu(), self.pool.cpu(), tables, lengths, scale=0.2, latent_width=self.latent
        )
        return out

    def plan(self, *, spare: int = 0) -> PagedPlan:
        longest = max(len(table) for table in self.tables)
        plan = PagedPlan.allocate(
            num_sequences=len(self.lengths) + spare,
            max_pages=longest + 2,
            page_tokens=self.pool.shape[1],
            device=DEVICE,
        )
        plan.update_(self.tables, self.lengths)
        return plan


def a_batch(
    lengths: list[int],
    dtype: torch.dtype,
    *,
    heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    page: int = 16,
    seed: int = 0,
) -> Batch:
    width = latent + rope
    pages = [-(-length // page) for length in lengths]
    shuffled = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed + 5))
    tables = list(torch.split(shuffled[: sum(pages)], pages))
    pool = torch.full((sum(pages) + 3, page, width), torch.nan, dtype=dtype)
    for number, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        rows = randn(len(table) * page, width, dtype=dtype, seed=seed + 100 * number)
        rows[length:] = torch.nan
        pool[table] = rows.view(-1, page, width)
    q = randn(len(lengths), heads, width, dtype=dtype, seed=seed + 9)
    return Batch(q.to(DEVICE), pool.to(DEVICE), tables, lengths, latent)


def the_kernel(name: str, batch: Batch) -> MlaDecode:
    sequences, heads, width = batch.q.shape
    return taken(
        name, Problem(DEVICE.type, batch.pool.dtype, heads, batch.latent, width, sequences, batch.pool.shape[1])
    )


def taken(name: str, problem: Problem) -> MlaDecode:
    """Return a backend's kernel for a problem, or skip the test where it refuses that."""
    try:
        return choose("mla_decode", mla_decode.BACKENDS, problem, name).load()
    except NoKernelError as err:
        pytest.skip(str(err))


@pytest.mark.parametrize(("heads", "latent", "rope", "page", "lengths", "dtype"), SMALL_CASES)
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_a_paged_decode_step_equals_the_reference(
    name: str, heads: int, latent: int, rope: int, page: int, lengths: list[int], dtype: torch.dtype
) -> None:
    batch = a_batch(lengths, dtype, heads=heads, latent=latent, rope=rope, page=page)
    kernel = the_kernel(name, batch)

    out = kernel(batch.q, batch.pool, DecodePlan.of(batch.plan()), scale=0.2, latent_width=latent)

    assert out.dtype == batch.q.dtype
    torch.testing.assert_close(out.cpu().float(), batch.expected(), atol=TOLERANCE[dtype], rtol=0)


def test_a_step_that_is_planned_from_tables_runs_on_the_chosen_kernel() -> None:
    batch = a_batch([5, 300, 17], torch.float32)

    plan = DecodePlan.make(batch.tables, batch.lengths, page_tokens=16, device=DEVICE)
    out = mla_decode.mla_decode(batch.q, batch.pool, plan, scale=0.2, latent_width=batch.latent)

    torch.testing.assert_close(out.cpu(), batch.expected(), atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize(
    "lengths",
    [[1], [5, 3000, 2999, 64], [40_000], [500, 0, 64, 1, 0, 4000, 129, 33], [700] * 64, [9000, 1, 0, 100] * 8],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
@pytest.mark.parametrize("heads", [5, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("name", ["triton", "narrow", "heads", "flashmla"])
def test_the_real_shapes_equal_the_reference(name: str, heads: int, lengths: list[int]) -> None:
    if name == "flashmla" and 0 in lengths:
        pytest.skip("what it gives where there is no sequence is not asked for")
    kernel = taken(name, Problem(DEVICE.type, torch.bfloat16, heads, 512, 576, len(lengths)))
    batch = a_batch(lengths, torch.bfloat16, heads=heads, latent=512, rope=64, page=64)
    batch.q.mul_(0.3)  # scores of a spread like those of a model

    out = kernel(batch.q, batch.pool, DecodePlan.of(batch.plan()), scale=0.2, latent_width=512).cpu().float()

    expected = batch.expected()
    assert float((out - expected).norm() / expected.norm()) < 6e-3  # FlashMLA rounds its output to bf16
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=0)


def quantised(whole: Batch) -> tuple[Batch, Batch]:
    """Return a batch of 8-bit rows, unused ones not-a-number, and one of the rows that those stand for."""
    flat = whole.pool.cpu().flatten(0, 1)
    packed = quant.quantise(flat.nan_to_num(0.0), latent_width=whole.latent)
    exact = quant.dequantise(packed, latent_width=whole.latent).view(whole.pool.shape)
    packed[flat.isnan().any(-1)] = 0xFF  # not-a-number of every type in a row
    pool = packed.view(*whole.pool.shape[:2], -1).to(DEVICE)
    return (
        Batch(whole.q, pool, whole.tables, whole.lengths, whole.latent),
        Batch(whole.q, exact, whole.tables, whole.lengths, whole.latent),
    )


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "page"), [(4, 32, 16, 16), (16, 256, 32, 64), (5, 512, 64, 32), (20, 512, 64, 64)]
)
@pytest.mark.parametrize("name", ["cuda", "triton", "torch"])
def test_quantised_rows_give_what_their_dequantised_rows_give(
    name: str, heads: int, latent: int, rope: int, page: int
) -> None:
    whole = a_batch([5, 130, 64], torch.bfloat16, heads=heads, latent=latent, rope=rope, page=page)
    batch, exact = quantised(whole)
    kernel = the_kernel(name, batch)

    out = kernel(batch.q, batch.pool, DecodePlan.of(batch.plan()), scale=0.2, latent_width=latent).cpu().float()

    torch.testing.assert_close(out, exact.expected(), atol=2e-2, rtol=0)
    # And of the rows before quantising, within what the rounding of e4m3 (at most 1/16 each) leaves in sums of many.
    assert float((out - whole.expected()).norm() / whole.expected().norm()) < 0.06


@pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("lengths", [[1], [5, 3000, 2999, 64], [40_000], [700] * 64, [9000, 1, 1, 100] * 8], ids=len)
@pytest.mark.parametrize("heads", [5, 16, 32])
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_the_real_shapes_of_quantised_rows_equal_the_reference(name: str, heads: int, lengths: list[int]) -> None:
    batch, exact = quantised(a_batch(lengths, torch.bfloat16, heads=heads, latent=512, rope=64, page=64))
    batch.q.mul_(0.3)
    kernel = the_kernel(name, batch)

    out = kernel(batch.q, batch.pool, DecodePlan.of(batch.plan()), scale=0.2, latent_width=512).cpu().float()

    expected = exact.expected()
    assert float((out - expected).norm() / expected.norm()) < 3e-3


@pytest.mark.parametrize("seed", [1, 2])
def test_a_refilled_plan_forgets_the_batch_before(seed: int) -> None:
    first, second = a_batch([40, 7, 90], torch.float32), a_batch([3, 80], torch.float32, seed=seed)
    kernel = the_kernel("triton", first)
    plan = first.plan()
    addresses = [tensor.data_ptr() for tensor in (plan.page_table_BP, plan.lengths_B, plan.slots_B, plan.starts_B1)]

    plan.update_(second.tables, second.lengths)

    q = torch.cat((second.q, torch.full_like(second.q[:1], torch.nan)))
    out = kernel(q, second.pool, DecodePlan.of(plan), scale=0.2, latent_width=32).cpu()
    torch.testing.assert_close(out[:2], second.expected(), atol=2e-5, rtol=0)
    assert not out[2].any(), "a place with no sequence gives zeros"
    assert plan.slots_B[2] == -1
    after = [tensor.data_ptr() for tensor in (plan.page_table_BP, plan.lengths_B, plan.slots_B, plan.starts_B1)]
    assert after == addresses


def test_a_plan_refuses_more_than_it_has_room_for() -> None:
    batch = a_batch([40, 7], torch.float32)
    plan = batch.plan()

    with pytest.raises(CapacityError, match="3 sequences of up to 1 pages, room for 2 of 5"):
        plan.update_([torch.tensor([0])] * 3, [1, 1, 1])
    with pytest.raises(CapacityError, match="1 sequences of up to 6 pages, room for 2 of 5"):
        plan.update_([torch.arange(6)], [96])


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
@pytest.mark.parametrize(("name", "heads"), [("cuda", 16), ("narrow", 16), ("heads", 64), ("triton", 16)])
def test_a_captured_step_follows_the_plan(name: str, heads: int) -> None:
    exact = batch = a_batch([300, 7, 90], torch.bfloat16, heads=heads, latent=512, rope=64, page=64)
    if name == "cuda":
        batch, exact = quantised(batch)
    kernel, plan = the_kernel(name, batch), batch.plan()
    decode_plan = DecodePlan.of(plan)
    kernel(batch.q, batch.pool, decode_plan, scale=0.2, latent_width=512)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh_()
        out = kernel(batch.q, batch.pool, decode_plan, scale=0.2, latent_width=512)

    shorter = Batch(exact.q, exact.pool, exact.tables, [129, 7, 30], exact.latent)
    plan.update_(shorter.tables, shorter.lengths)
    graph.replay()

    torch.testing.assert_close(out.cpu().float(), shorter.expected(), atol=3e-2, rtol=0)
