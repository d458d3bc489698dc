"""The CUDA C++ decode kernels over pages of bf16 rows: their sources run on the host, and what they refuse."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cuda_on_host
from kvrelay.kernels import cuda_choice, cuda_decode, flashmla, mla_decode, nvrtc, reference
from kvrelay.kernels.cuda_decode import Results
from kvrelay.kernels.dispatch import choose
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.pages_decode import HEADS, NARROW, PART_TILES, Arguments, PagesKernel

PAGE, LATENT, ROPE, SCALE = 64, 512, 64, 0.1
KERNELS = {"narrow": NARROW, "heads": HEADS}
Launch = Callable[[Arguments, int, int, int, int, bool], bytes | None]
WHOLE = 0  # the kernel with all of its barriers


def tensor_map(rows: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return what wgmma_on_host.h has in place of a driver's description."""
    words = torch.tensor([rows.data_ptr(), *rows.shape, *[0] * 13])
    return nvrtc.TensorMap.from_buffer_copy(words.numpy().tobytes())


class Built:
    """A kernel and its source compiled for the host."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.kernel = name, KERNELS[name]
        self.library = cuda_on_host.library(
            self.kernel.source,
            f"{name}_on_host.cpp",
            folder,
            threads=self.kernel.threads,
            empty=("ptx.cuh", "wgmma.cuh"),
        )
        self.library.launch.argtypes = [
            ctypes.POINTER(Arguments), ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_bool,
        ]  # fmt: skip

    def launch(
        self, q: Tensor, pool: Tensor, plan: PagedPlan, into: Results, *, parts: int, without: int, exact: bool
    ) -> bytes | None:
        """Return what went wrong, or None."""
        args = Arguments(
            rows=tensor_map(pool.flatten(0, 1)),
            queries=tensor_map(q.flatten(0, 1)),
            others=cuda_decode.Arguments.of(q, pool, plan, into, scale=SCALE, early=False),
        )
        blocks = -(-q.shape[1] // self.kernel.heads)
        failure: bytes | None = self.library.launch(ctypes.byref(args), blocks, parts, pool.nbytes, without, exact)
        return failure


@pytest.fixture(scope="module", params=KERNELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp(f"{request.param}_on_host"))


def test_a_block_is_given_the_memory_that_the_kernel_takes(built: Built) -> None:
    assert built.library.shared_bytes() == built.kernel.shared_bytes


@pytest.mark.parametrize(
    ("lengths", "heads", "parts"),
    [
        ([1], 64, 1),
        ([64], 20, 1),
        ([800], 16, 3),
        ([70, 0, 3, 190], 70, 4),
        ([33, 65, 0, 400, 1], 128, 3),
        ([31, 95, 97], 5, 2),  # a part begins in the middle of a page
    ],
    ids=str,
)
def test_the_kernel_on_the_host_equals_the_reference(built: Built, lengths: list[int], heads: int, parts: int) -> None:
    random = torch.Generator().manual_seed(len(lengths))
    tables, num_pages = cuda_on_host.scattered(lengths, PAGE, random)
    pool = torch.full((num_pages, PAGE, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
    for table, length in zip(tables, lengths, strict=True):
        rows = torch.randn(len(table) * PAGE, LATENT + ROPE, generator=random).to(torch.bfloat16)
        rows[length:] = torch.nan
        pool[table] = rows.view(-1, PAGE, LATENT + ROPE)
    q = torch.randn(len(lengths), heads, LATENT + ROPE, generator=random).to(torch.bfloat16)
    plan = cuda_on_host.a_plan(tables, lengths, PAGE)
    into = Results(q, latent_width=LATENT, parts=parts, out_dtype=torch.bfloat16)

    assert built.launch(q, pool, plan, into, parts=parts, without=WHOLE, exact=True) is None
    out = cuda_on_host.joined(into, plan, parts, tiles=PART_TILES)

    for seq, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if not length:
            assert not out[seq].any()
            continue
        expected = reference.mla_decode(
            q[seq : seq + 1].float(), pool.float(), [table], [length], scale=SCALE, latent_width=LATENT
        )
        assert float((out[seq] - expected[0]).norm() / expected.norm()) < 4e-3  # weights and results are rounded


def failure(built: Built, lengths: list[int], parts: int, *, without: int = WHOLE) -> bytes | None:
    """Run the kernel over zeros, without its products."""
    tables, num_pages = cuda_on_host.scattered(lengths, PAGE, torch.Generator().manual_seed(1))
    pool = torch.zeros(num_pages, PAGE, LATENT + ROPE, dtype=torch.bfloat16)
    q = torch.zeros(len(lengths), built.kernel.heads, LATENT + ROPE).bfloat16()
    plan = cuda_on_host.a_plan(tables, lengths, PAGE)
    into = Results(q, latent_width=LATENT, parts=parts, out_dtype=torch.bfloat16)
    return built.launch(q, pool, plan, into, parts=parts, without=without, exact=False)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("lengths", [[1300], [64, 64, 64], [33, 1, 64, 0, 65, 500, 31, 0, 96]], ids=str)
def test_barriers_order_what_threads_and_copies_do_in_shared_memory(
    built: Built, lengths: list[int], parts: int
) -> None:
    assert failure(built, lengths, parts) is None


# Numbers of cuda_on_host.h. What the barriers of a group or a warp order is what products read, which is not watched.
LEFT_OUT = {
    "the barrier of both groups, or of the only one": 1,
    "rows, queries or weights are full": 17,
    "rows or queries are empty": 18,
    "they are empty, a phase too early": 19,
    "the fence before copies": 20,
}


@pytest.mark.parametrize("without", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_the_kernel_is_run_without_is_missed(built: Built, without: int) -> None:
    lengths = [330, 64, 90, 700]
    assert failure(built, lengths, 1) is None
    assert failure(built, lengths, 1, without=without) is not None


@pytest.mark.skipif(nvrtc.nvrtc_refuses() is not None, reason=f"{nvrtc.nvrtc_refuses()}")
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_nvrtc_takes_the_source_and_nothing_is_spilled(kernel: PagesKernel, cluster: int) -> None:
    image, log = nvrtc.compile_image(kernel.source, "sm_90a", {"CLUSTER": cluster})

    assert image.startswith(b"\x7fELF")
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "Performance Loss" not in log


@pytest.mark.parametrize(
    ("device", "dtype", "latent", "row", "page", "reason"),
    [
        ("cpu", torch.bfloat16, 512, 576, 64, "runs on cuda, not cpu"),
        ("cuda", torch.uint8, 512, 576, 64, "takes bf16, not torch.uint8"),
        ("cuda", torch.bfloat16, 256, 288, 64, "takes rows of 512 + 64, not 256 + 32"),
        ("cuda", torch.bfloat16, 512, 576, 32, "takes pages of 64 rows, not 32"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(
    device: str, dtype: torch.dtype, latent: int, row: int, page: int, reason: str
) -> None:
    assert cuda_choice.narrow_decode_refuses(device, dtype, 16, latent, row, page) == reason
    assert cuda_choice.heads_decode_refuses(device, dtype, 64, latent, row, page) == reason


@pytest.mark.parametrize(
    ("heads", "taken_by"),
    [(1, "narrow"), (16, "narrow"), (17, "heads"), (32, "heads"), (64, "heads"), (128, "heads")],
)
def test_the_heads_say_which_kernel_runs(monkeypatch: pytest.MonkeyPatch, heads: int, taken_by: str) -> None:
    monkeypatch.setattr(cuda_choice, "_compiler_refuses", lambda _: None)
    monkeypatch.setattr(PagesKernel, "compile_refuses", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    refusals = {
        "narrow": cuda_choice.narrow_decode_refuses("cuda", torch.bfloat16, heads, 512, 576, 64),
        "heads": cuda_choice.heads_decode_refuses("cuda", torch.bfloat16, heads, 512, 576, 64),
    }

    assert [name for name, why in refusals.items() if why is None] == [taken_by]


@pytest.mark.parametrize(
    ("heads", "sequences", "chosen"),
    [
        (16, 1, "narrow"),
        (16, 64, "narrow"),
        (64, 1, "heads"),
        (64, 64, "heads"),
        (128, 8, "heads"),
        (128, 31, "heads"),
        (128, 32, "flashmla"),
        (192, 64, "flashmla"),
        (96, 64, "heads"),  # which FlashMLA does not take
    ],
)
def test_heads_and_batch_say_which_kernel_runs_where_all_can(
    monkeypatch: pytest.MonkeyPatch, heads: int, sequences: int, chosen: str
) -> None:
    monkeypatch.setattr(cuda_choice, "_compiler_refuses", lambda _: None)
    monkeypatch.setattr(PagesKernel, "compile_refuses", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flashmla, "import_refuses", lambda *_: None)
    problem = mla_decode.Problem("cuda", torch.bfloat16, heads, LATENT, LATENT + ROPE, sequences)

    assert choose("mla_decode", mla_decode.BACKENDS, problem).name == chosen


@pytest.mark.parametrize(("installed", "chosen"), [(True, "flashmla"), (False, "triton")])
def test_others_run_where_ours_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, installed: bool, chosen: str
) -> None:
    monkeypatch.setattr(cuda_choice, "_compiler_refuses", lambda _: "no compiler")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flashmla, "import_refuses", lambda *_: None if installed else "not installed")
    problem = mla_decode.Problem("cuda", torch.bfloat16, 64, LATENT, LATENT + ROPE, 8)

    assert choose("mla_decode", mla_decode.BACKENDS, problem).name == chosen
