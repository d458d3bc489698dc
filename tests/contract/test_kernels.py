"""Every kernel backend against the fp32 reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrelay.core.errors import NoKernelError
from kvrelay.kernels import mla_decode, mla_prefill, reference
from kvrelay.kernels.dispatch import Backend, choose
from kvrelay.kernels.merge import merge_partials
from kvrelay.kernels.mla_decode import DecodePlan
from kvrelay.kernels.rope import Rope, apply_rope, half_split_order, inverse_frequencies
from kvrelay.kernels.rope_spec import RopeKind, RopeSpec

CPU = torch.device("cpu")
PAGE = 16
# What rounding of the inputs alone may do: results are compared with the reference over the same rounded inputs.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}
DTYPES = list(TOLERANCE)


def prefill_backends() -> list[str]:
    problem = mla_prefill.Problem("cpu", torch.float32, 24, 16)
    return [backend.name for backend in mla_prefill.BACKENDS if backend.refuses(problem) is None]


def decode_backends() -> list[str]:
    problem = mla_decode.Problem("cpu", torch.float32, 4, 32, 40, 1)
    return [backend.name for backend in mla_decode.BACKENDS if backend.refuses(problem) is None]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        (1, 1, True),
        (1, 77, False),
        (33, 33, True),
        (300, 300, True),
        (5, 2500, False),
        (520, 520, True),
        (257, 31, False),
    ],
)
@pytest.mark.parametrize(("heads", "key_width", "value_width"), [(4, 24, 16), (5, 20, 20), (2, 10, 16)])
@pytest.mark.parametrize("name", prefill_backends())
def test_a_prefill_block_equals_the_reference(
    name: str, heads: int, key_width: int, value_width: int, queries: int, keys: int, causal: bool, dtype: torch.dtype
) -> None:
    q = randn(queries, heads, key_width, dtype=dtype, seed=1)
    k = randn(keys, heads, key_width, dtype=dtype, seed=2)
    v = randn(keys, heads, value_width, dtype=dtype, seed=3)
    problem = mla_prefill.Problem("cpu", dtype, key_width, value_width)

    out, lse = mla_prefill.kernel_for(problem, name)(q, k, v, scale=0.3, causal=causal)

    out_expected, lse_expected = reference.attend_block(q, k, v, scale=0.3, causal=causal)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, out_expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse, lse_expected, atol=TOLERANCE[dtype], rtol=1e-6)


@pytest.mark.parametrize("name", prefill_backends())
def test_large_scores_do_not_overflow(name: str) -> None:
    q, k, v = (randn(40, 2, 8, dtype=torch.float32, seed=seed) for seed in (1, 2, 3))
    problem = mla_prefill.Problem("cpu", torch.float32, 8, 8)

    out, lse = mla_prefill.kernel_for(problem, name)(q * 100, k * 100, v, scale=1.0, causal=True)

    out_expected, lse_expected = reference.attend_block(q * 100, k * 100, v, scale=1.0, causal=True)
    torch.testing.assert_close(out, out_expected, atol=1e-2, rtol=0)
    torch.testing.assert_close(lse, lse_expected, atol=0, rtol=1e-5)


def test_merging_blocks_equals_one_softmax_whatever_the_order() -> None:
    q, k, v = (
        randn(9, 3, 8, dtype=torch.float32),
        randn(50, 3, 8, dtype=torch.float32),
        randn(50, 3, 6, dtype=torch.float32),
    )
    cuts = [(0, 7), (7, 30), (30, 50)]
    parts = [reference.attend_block(q, k[a:b], v[a:b], scale=0.5, causal=False) for a, b in cuts]
    whole = reference.attend_block(q, k, v, scale=0.5, causal=False)

    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        first, second, third = (parts[index] for index in order)
        merged = merge_partials(*merge_partials(*first, *second), *third)
        torch.testing.assert_close(merged, whole, atol=1e-6, rtol=1e-6)


def test_a_partial_with_no_visible_key_changes_nothing() -> None:
    out, lse = randn(4, 2, 3, dtype=torch.float32), randn(4, 2, dtype=torch.float32)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)

    torch.testing.assert_close(merge_partials(out, lse, *nothing), (out, lse))
    both_out, both_lse = merge_partials(*nothing, *nothing)
    assert not both_out.any()
    assert (both_lse == -torch.inf).all()


def a_batch(lengths: list[int], dtype: torch.dtype, *, heads: int = 4) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return queries, one pool layer whose unused rows are not-a-number, and scattered page tables."""
    pages = [-(-length // PAGE) for length in lengths]
    shuffled = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(5))
    tables = list(torch.split(shuffled[: sum(pages)], pages))
    pool = torch.full((sum(pages) + 3, PAGE, 40), torch.nan, dtype=dtype)
    for number, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        for index, page in enumerate(table.tolist()):
            rows = min(PAGE, length - index * PAGE)
            pool[page, :rows] = randn(rows, 40, dtype=dtype, seed=100 * number + index)
    return randn(len(lengths), heads, 40, dtype=dtype, seed=9), pool, tables


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[1], [16], [17], [5, 300, 299, 64], [1000, 3, 3, 3, 998, 400], [64] * 8],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
@pytest.mark.parametrize("name", decode_backends())
def test_a_decode_step_equals_the_reference(name: str, lengths: list[int], dtype: torch.dtype) -> None:
    q, pool, tables = a_batch(lengths, dtype)
    plan = DecodePlan.make(tables, lengths, page_tokens=PAGE, device=CPU)
    kernel = mla_decode.kernel_for(mla_decode.Problem("cpu", dtype, 4, 32, 40, len(lengths)), name)

    out = kernel(q, pool, plan, scale=0.2, latent_width=32)

    expected = reference.mla_decode(q, pool, [t.tolist() for t in tables], lengths, scale=0.2, latent_width=32)
    assert out.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0  # of the answer
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=rounding)


def test_a_long_sequence_is_read_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [700, 690, 64, 1]
    q, pool, tables = a_batch(lengths, torch.float32)
    monkeypatch.setattr(mla_decode, "BLOCK_BYTES", 1)  # blocks of 64 rows; the shorter end inside and before a block
    plan = DecodePlan.make(tables, lengths, page_tokens=PAGE, device=CPU)

    out = mla_decode.mla_decode(q, pool, plan, scale=0.2, latent_width=32)

    expected = reference.mla_decode(q, pool, [t.tolist() for t in tables], lengths, scale=0.2, latent_width=32)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_padding_of_a_ragged_batch_stays_small(seed: int) -> None:
    lengths = torch.randint(1, 30_000, (48,), generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [torch.zeros(-(-length // 64), dtype=torch.int64) for length in lengths]

    plan = DecodePlan.make(tables, lengths, page_tokens=64, device=CPU)

    assert plan.gathered_rows <= 1.125 * sum(lengths) + len(lengths) * mla_decode.FREE_PADDING_TOKENS
    assert sum(group.end - group.start for group in plan.groups) == len(lengths)


def test_the_plan_says_where_the_new_row_goes() -> None:
    tables = [torch.tensor([7, 2, 9]), torch.tensor([4])]

    plan = DecodePlan.make(tables, [2 * PAGE + 3, 1], page_tokens=PAGE, device=CPU)

    assert plan.slots_B.tolist() == [9 * PAGE + 2, 4 * PAGE]
    assert plan.lengths_B.tolist() == [2 * PAGE + 3, 1]


@pytest.mark.parametrize("width", [6, 8, 16])
def test_rope_turns_pairs_as_complex_numbers(width: int) -> None:
    spec = RopeSpec(kind=RopeKind.DEFAULT, width=width, theta=10000.0)
    x, positions = randn(11, 3, width, dtype=torch.float32), torch.arange(100, 111)

    turned = apply_rope(x, Rope(spec, CPU).tables(positions, 0))

    torch.testing.assert_close(turned, reference.apply_rope(x, positions, inverse_frequencies(spec)), atol=2e-5, rtol=0)
    torch.testing.assert_close(apply_rope(x[:, 1], Rope(spec, CPU).tables(positions, 0)), turned[:, 1])


def test_half_split_order_undoes_interleaving() -> None:
    assert half_split_order(6).tolist() == [0, 2, 4, 1, 3, 5]


def test_dynamic_ntk_changes_nothing_within_its_window_and_follows_each_length_beyond() -> None:
    spec = RopeSpec(kind=RopeKind.DYNAMIC, width=16, theta=10000.0, factor=4.0, original_max_tokens=256)
    rope, positions = Rope(spec, CPU), torch.tensor([10, 300, 299])

    within = rope.tables(positions, 256)
    ragged = rope.tables(positions, torch.tensor([11, 301, 2000]))

    torch.testing.assert_close(
        within.cos_TR, Rope(RopeSpec(kind=RopeKind.DEFAULT, width=16, theta=10000.0), CPU).tables(positions, 0).cos_TR
    )
    torch.testing.assert_close(ragged.cos_TR[0], within.cos_TR[0])
    for row, length in ((1, 301), (2, 2000)):
        torch.testing.assert_close(ragged.cos_TR[row], rope.tables(positions, length).cos_TR[row])
        assert not torch.allclose(ragged.cos_TR[row], within.cos_TR[row])


def test_the_first_backend_that_accepts_is_chosen_and_a_refusal_names_every_reason() -> None:
    backends: tuple[Backend[int, str], ...] = (
        Backend("fast", lambda n: f"{n} is odd" if n % 2 else None, lambda: "fast"),
        Backend("slow", lambda n: f"{n} is negative" if n < 0 else None, lambda: "slow"),
    )

    assert choose("k", backends, 4).name == "fast"
    assert choose("k", backends, 3).name == "slow"
    assert choose("k", backends, 4, "slow").name == "slow"
    with pytest.raises(NoKernelError, match="fast: -3 is odd; slow: -3 is negative"):
        choose("k", backends, -3)
    with pytest.raises(NoKernelError, match="faster: no such backend"):
        choose("k", backends, 4, "faster")


@pytest.mark.parametrize("block_bytes", [1, 4 << 20])
def test_one_sequence_in_consecutive_pages_is_read_in_place(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(mla_decode, "BLOCK_BYTES", block_bytes)
    q, pool = randn(1, 4, 40, dtype=torch.float32, seed=1), randn(20, PAGE, 40, dtype=torch.float32, seed=2)
    pool.view(-1, 40)[3 * PAGE + 150 :] = torch.nan  # behind the end
    table = torch.arange(3, 15)

    plan = DecodePlan.make([table], [150], page_tokens=PAGE, device=CPU)
    out = mla_decode.mla_decode(q, pool, plan, scale=0.2, latent_width=32)

    assert plan.groups[0].run == 3 * PAGE
    expected = reference.mla_decode(q, pool, [table.tolist()], [150], scale=0.2, latent_width=32)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
