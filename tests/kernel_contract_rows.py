"""What the kernels around attention must give: merge, prefill blocks, checksum, pages, rows. See kernel_contract.py."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_contract import DEVICE, ON_GPU, randn
from kvrelay.core.layout import fp8_row_bytes
from kvrelay.kernels import checksum, gpu_prefill, mla_prefill, quant, reference, triton_checksum, triton_join
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.pieces import Pieces
from kvrelay.kernels.rope import Rope, RopeTables, apply_rope
from kvrelay.kernels.rope_spec import RopeKind, RopeSpec
from kvrelay.kernels.triton_merge import merge
from kvrelay.kernels.triton_pack import pack_pieces
from kvrelay.kernels.triton_rows import write_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_merge_equals_one_softmax(dtype: torch.dtype) -> None:
    q, k, v = (randn(*shape, dtype=torch.float32, seed=1) for shape in ((9, 3, 8), (50, 3, 8), (50, 3, 6)))
    (out_a, lse_a), (out_b, lse_b) = (
        reference.attend_block(q, k[cut], v[cut], scale=0.5, causal=False) for cut in (slice(0, 20), slice(20, 50))
    )
    lse_a[2], out_a[2] = -torch.inf, 0.0
    lse_b[2:4], out_b[2:4] = -torch.inf, 0.0
    halves = (
        out_a.to(DEVICE).contiguous(),
        lse_a.to(DEVICE),
        out_b.to(dtype).to(DEVICE),
        lse_b.T.contiguous().T.to(DEVICE),
    )

    out, lse = merge(*halves)

    weight = (lse_b - torch.logaddexp(lse_a, lse_b)).exp().nan_to_num(0.0)[..., None]
    torch.testing.assert_close(
        out.cpu(), out_a * (1 - weight) + out_b * weight, atol=3e-2 if dtype != torch.float32 else 1e-5, rtol=0
    )
    torch.testing.assert_close(lse.cpu(), torch.logaddexp(lse_a, lse_b), atol=1e-5, rtol=0)
    assert not out[2].any()
    again, _ = merge(*halves, into=halves[0])
    assert again.data_ptr() == halves[0].data_ptr()
    torch.testing.assert_close(again, out, atol=0, rtol=0)


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("heads", [3, 70])
def test_pieces_are_joined_by_their_normalisers(heads: int, tiles: int) -> None:
    lengths, parts, latent = [700, 0, 64, 90, 1500], 7, 48
    plan = PagedPlan.allocate(num_sequences=len(lengths), max_pages=30, page_tokens=64, device=DEVICE)
    plan.update_([torch.arange(-(-length // 64)) for length in lengths], lengths)
    pieces = randn(parts + len(lengths), heads, latent, dtype=torch.float32, seed=1)
    lse = randn(parts + len(lengths), heads, dtype=torch.float32, seed=2) * 20
    out = torch.full((len(lengths), heads, latent), 7.0, device=DEVICE)

    triton_join.join(out, pieces.to(DEVICE), lse.to(DEVICE), plan, parts=parts, early=False, tiles=tiles)

    starts = plan.starts_B1.tolist()
    per_part = math.ceil(math.ceil(starts[-1] / parts) / tiles) * tiles
    for seq, (start, end) in enumerate(itertools.pairwise(starts)):
        first, last = start // per_part, (end - 1) // per_part
        expected = torch.full((heads, latent), 0.0 if start == end else 7.0)  # one piece is not touched
        if last > first:
            cut = slice(first + seq, last + seq + 1)
            weight = torch.softmax(lse[cut].double() * math.log(2), 0)[..., None]
            expected = (pieces[cut] * weight).sum(0).float()
        torch.testing.assert_close(out[seq].cpu(), expected, atol=1e-5, rtol=0)


PREFILL = [(1, 77, False), (33, 33, True), (300, 300, True), (5, 2500, False), (520, 520, True), (257, 31, False)]
PREFILL.append((1100, 4096, False))  # 144 tiles of 16 heads on 132 processors: the last ones are attended apart


@pytest.mark.skipif(not ON_GPU, reason="kernels of others, for GPUs alone")
@pytest.mark.parametrize(("queries", "keys", "causal"), PREFILL)
@pytest.mark.parametrize(("heads", "key_width", "value_width"), [(16, 192, 128), (4, 96, 64)])
@pytest.mark.parametrize("name", ["flash-attn-4", "cudnn", "torch"])
def test_a_prefill_block_equals_the_reference(
    name: str, heads: int, key_width: int, value_width: int, queries: int, keys: int, causal: bool
) -> None:
    problem = mla_prefill.Problem("cuda", torch.bfloat16, key_width, value_width)
    backend = next(backend for backend in mla_prefill.BACKENDS if backend.name == name)
    if (why := backend.refuses(problem)) is not None:
        pytest.skip(why)
    q, k, v = a_prefill(queries, keys, heads, key_width, value_width)

    out, lse = backend.load()(q, k, v, scale=0.1, causal=causal)

    out_expected, lse_expected = reference.attend_block(q.cpu(), k.cpu(), v.cpu(), scale=0.1, causal=causal)
    torch.testing.assert_close(out.float().cpu(), out_expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.cpu(), lse_expected, atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="kernels of others, for GPUs alone")
@pytest.mark.parametrize("tokens", [33, 192, 520])
def test_long_causal_calls_have_tiles_of_their_own(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mla_prefill.Problem("cuda", torch.bfloat16, 192, 128)
    if (why := gpu_prefill.flash4_refuses(problem)) is not None:
        pytest.skip(why)
    monkeypatch.setattr(gpu_prefill, "LONG_KEYS", 1)
    q, k, v = a_prefill(tokens, tokens, 16, 192, 128)

    out, lse = gpu_prefill.load_flash4()(q, k, v, scale=0.1, causal=True)

    out_expected, lse_expected = reference.attend_block(q.cpu(), k.cpu(), v.cpu(), scale=0.1, causal=True)
    torch.testing.assert_close(out.float().cpu(), out_expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.cpu(), lse_expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ragged_batch_equals_its_requests_one_by_one(causal: bool) -> None:
    queries = (100, 1, 333)
    keys = queries if causal else (7, 500, 64)
    q, k, v = a_prefill(sum(queries), sum(keys), 4, 192, 128)

    out, lse = mla_prefill.attend_ragged(
        q, k, v, mla_prefill.Ragged.make(queries, keys, DEVICE), scale=0.1, causal=causal
    )

    parts = zip(*(torch.split(x.cpu(), list(n)) for x, n in ((q, queries), (k, keys), (v, keys))), strict=True)
    expected = [reference.attend_block(*part, scale=0.1, causal=causal) for part in parts]
    torch.testing.assert_close(out.float().cpu(), torch.cat([part for part, _ in expected]), atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.cpu(), torch.cat([part for _, part in expected]), atol=1e-3, rtol=1e-4)


def a_prefill(queries: int, keys: int, heads: int, key_width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v; values are a view, as the model's are."""
    q = randn(queries, heads, key_width, dtype=torch.bfloat16, seed=1)
    k = randn(keys, heads, key_width, dtype=torch.bfloat16, seed=2)
    up = randn(keys, heads, 128 + value_width, dtype=torch.bfloat16, seed=3)
    return q.to(DEVICE), k.to(DEVICE), up.to(DEVICE)[..., 128:]


def test_the_device_checksum_equals_the_hosts() -> None:
    rows = torch.randint(-(1 << 63), (1 << 63) - 1, (300, 144), generator=torch.Generator().manual_seed(1))
    host = checksum.checksum_bytes(rows.numpy().data)
    on_device = rows.to(DEVICE)

    assert checksum.to_unsigned(int(triton_checksum.word_sum(on_device.view(-1), first_word=0))) == host
    pages = [(7, 20), (120, 180), (50, 3)]  # first row, rows
    ranges = [(first * 144 * 8, rows * 144 * 8) for first, rows in pages]
    in_order = torch.cat([rows[first : first + number] for first, number in pages])
    by_piece = triton_checksum.piece_sum(on_device.view(-1), Pieces.of(ranges, DEVICE))
    assert checksum.to_unsigned(int(by_piece)) == checksum.checksum_bytes(in_order.numpy().data)
    assert checksum.checksum_ranges(rows.numpy().data.cast("B"), ranges) == checksum.to_unsigned(int(by_piece))
    cut = 7 * 144
    parts = [
        int(triton_checksum.word_sum(on_device.view(-1)[:cut].contiguous(), first_word=0)),
        int(triton_checksum.word_sum(on_device.view(-1)[cut:].contiguous(), first_word=cut)),
    ]
    assert checksum.to_unsigned(sum(parts)) == host


@pytest.mark.parametrize("row_words", [144, 5])
def test_pieces_are_packed_one_behind_the_other(row_words: int) -> None:
    memory = torch.randint(-(1 << 63), (1 << 63) - 1, (700, row_words), generator=torch.Generator().manual_seed(3))
    rows = [(640, 60), (3, 1), (100, 333), (0, 2)]  # the long one is cut into several pieces
    row_bytes = row_words * 8
    pieces = Pieces.of([(first * row_bytes, number * row_bytes) for first, number in rows], DEVICE)
    expected = torch.cat([memory[first : first + number] for first, number in rows])
    on_device, packed = memory.to(DEVICE), torch.zeros(400, row_words, dtype=torch.int64, device=DEVICE)

    pack_pieces(on_device.view(-1), pieces, packed.view(-1))
    assert pieces.num_words == expected.numel()
    assert torch.equal(packed[: len(expected)].cpu(), expected)
    assert not packed[len(expected) :].any()


@pytest.mark.parametrize(("latent", "rope"), [(48, 24), (256, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_rows_equal_norm_and_rope_one_after_the_other(latent: int, rope: int, dtype: torch.dtype) -> None:
    mixed = randn(5, 10 + latent + rope, dtype=dtype)
    latents, keys = mixed[:, 10 : 10 + latent], mixed[:, 10 + latent :]
    norm = randn(latent, dtype=dtype, seed=3)
    tables = Rope(RopeSpec(kind=RopeKind.DEFAULT, width=rope, theta=1e4), torch.device("cpu")).tables(
        torch.arange(90, 95), 0
    )
    expected = torch.cat((F.rms_norm(latents, (latent,), norm, 1e-6), apply_rope(keys, tables)), -1)
    pool = torch.full((8, latent + rope), 7.0, dtype=dtype, device=DEVICE)
    slots = torch.tensor([6, 0, -1, 3, 2], device=DEVICE)
    rows = torch.empty(5, latent + rope, dtype=dtype, device=DEVICE)
    on_device = RopeTables(tables.cos_TR.to(DEVICE), tables.sin_TR.to(DEVICE))
    moved = mixed.to(DEVICE)

    write_rows(
        moved[:, 10 : 10 + latent], moved[:, 10 + latent :],
        norm_C=norm.to(DEVICE), eps=1e-6, tables=on_device, slots_T=slots, pool=pool, rows_TW=rows,
    )  # fmt: skip

    torch.testing.assert_close(rows.cpu(), expected, atol=1e-5 if dtype == torch.float32 else 4e-2, rtol=0)
    assert torch.equal(pool[[6, 0, 3, 2]], rows[[0, 1, 3, 4]])
    assert (pool[[1, 4, 5, 7]] == 7.0).all(), "a negative slot stores nothing"


@pytest.mark.parametrize(("latent", "rope"), [(32, 16), (256, 32)])
def test_fused_quantised_rows_have_the_bytes_of_the_reference(latent: int, rope: int) -> None:
    mixed = randn(5, latent + rope, dtype=torch.bfloat16).to(DEVICE)
    tables = Rope(RopeSpec(kind=RopeKind.DEFAULT, width=rope, theta=1e4), DEVICE).tables(
        torch.arange(5, device=DEVICE), 0
    )
    pool = torch.zeros(5, fp8_row_bytes(latent, rope), dtype=torch.uint8, device=DEVICE)
    rows = torch.empty_like(mixed)

    write_rows(
        mixed[:, :latent], mixed[:, latent:], norm_C=torch.ones(latent, dtype=torch.bfloat16, device=DEVICE),
        eps=1e-6, tables=tables, slots_T=torch.arange(5, device=DEVICE), pool=pool, rows_TW=rows,
    )  # fmt: skip

    found, expected = pool.cpu(), quant.quantise(rows.cpu(), latent_width=latent)
    if not ON_GPU:  # the interpreter's e4m3 rounds ties up and loses the carry into the exponent
        found, expected = found[:, latent:], expected[:, latent:]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spread", [1.0, 1e-4, 3e3])
def test_quantising_keeps_its_error_bound(spread: float) -> None:
    rows = randn(64, 256 + 32, dtype=torch.bfloat16) * spread
    rows[3, :128] = 0.0
    rows[5, 7] *= 100  # an outlier coarsens its own group alone
    rows[:, 256:] *= 1000

    back = quant.dequantise(quant.quantise(rows, latent_width=256), latent_width=256).float()

    largest = rows[:, :256].float().reshape(64, 2, 128).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
    bound = torch.maximum(rows[:, :256].float().abs() / 16, largest / 2**17)
    assert ((back - rows.float())[:, :256].abs() <= bound).all()
    assert torch.equal(back[:, 256:], rows[:, 256:].float())


def test_queries_are_rotated_beside_the_rows() -> None:
    x, mixed = randn(4, 3, 40, dtype=torch.float32), randn(4, 32 + 16, dtype=torch.float32, seed=2)
    tables = Rope(RopeSpec(kind=RopeKind.DEFAULT, width=16, theta=1e4), torch.device("cpu")).tables(torch.arange(4), 0)
    on_device, moved = x.to(DEVICE), mixed.to(DEVICE)
    out = on_device if ON_GPU else x.clone()  # in place; the interpreter copies its arguments, so not there
    pool = torch.empty(4, 48, device=DEVICE)

    write_rows(
        moved[:, :32], moved[:, 32:], norm_C=torch.ones(32, device=DEVICE), eps=1e-6,
        tables=RopeTables(tables.cos_TR.to(DEVICE), tables.sin_TR.to(DEVICE)),
        slots_T=torch.arange(4, device=DEVICE), pool=pool, turn=(on_device[..., 24:], out[..., 24:]),
    )  # fmt: skip

    torch.testing.assert_close(out[..., 24:].cpu(), apply_rope(x[..., 24:], tables), atol=1e-5, rtol=0)
    assert torch.equal(out[..., :24].cpu(), x[..., :24])
    expected = torch.cat((F.rms_norm(mixed[:, :32], (32,), None, 1e-6), apply_rope(mixed[:, 32:], tables)), -1)
    torch.testing.assert_close(pool.cpu(), expected, atol=1e-5, rtol=0)
