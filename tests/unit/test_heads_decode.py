"""The CUDA C++ decode kernel for many heads: its source run on the host, and what it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cuda_on_host
from kvrelay.kernels import cuda_choice, cuda_decode, nvrtc, reference
from kvrelay.kernels.cuda_decode import Results
from kvrelay.kernels.heads_decode import HEADS, PART_TILES, SHARED_BYTES, SOURCE, THREADS, Arguments
from kvrelay.kernels.paged_plan import PagedPlan

PAGE, LATENT, ROPE, SCALE = 64, 512, 64, 0.1
Launch = Callable[[Arguments, int, int, int, int, bool], bytes | None]
WHOLE = 0  # the kernel with all of its barriers


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("heads_on_host")
    return cuda_on_host.library(SOURCE, "heads_on_host.cpp", folder, threads=THREADS, empty=("ptx.cuh", "wgmma.cuh"))


@pytest.fixture(scope="module")
def launch(library: ctypes.CDLL) -> Launch:
    library.launch.argtypes = [
        ctypes.POINTER(Arguments), ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_bool,
    ]  # fmt: skip
    return lambda args, *others: library.launch(ctypes.byref(args), *others)


def test_a_block_is_given_the_memory_that_the_kernel_takes(library: ctypes.CDLL) -> None:
    assert library.shared_bytes() == SHARED_BYTES


def arguments(q: Tensor, pool: Tensor, plan: PagedPlan, into: Results) -> Arguments:
    words = [pool.data_ptr(), pool.shape[0] * PAGE, LATENT + ROPE, *[0] * 13]  # as heads_on_host.cpp has them
    return Arguments(
        rows=nvrtc.TensorMap.from_buffer_copy(torch.tensor(words).numpy().tobytes()),
        others=cuda_decode.Arguments.of(q, pool, plan, into, scale=SCALE, early=False),
    )


@pytest.mark.parametrize(
    ("lengths", "heads", "parts"),
    [
        ([1], 64, 1),
        ([64], 20, 1),
        ([800], 64, 3),
        ([70, 0, 3, 190], 70, 4),
        ([33, 65, 0, 400, 1], 128, 3),
        ([31, 95, 97], 64, 2),  # a part begins in the middle of a page
    ],
    ids=str,
)
def test_the_kernel_on_the_host_equals_the_reference(
    launch: Launch, lengths: list[int], heads: int, parts: int
) -> None:
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

    args = arguments(q, pool, plan, into)
    assert launch(args, -(-heads // HEADS), parts, pool.nbytes, WHOLE, True) is None
    out = cuda_on_host.joined(into, plan, parts, tiles=PART_TILES)

    for seq, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if not length:
            assert not out[seq].any()
            continue
        expected = reference.mla_decode(
            q[seq : seq + 1].float(), pool.float(), [table], [length], scale=SCALE, latent_width=LATENT
        )
        assert float((out[seq] - expected[0]).norm() / expected.norm()) < 4e-3  # weights and results are rounded


def failure(launch: Launch, lengths: list[int], parts: int, *, without: int = WHOLE) -> bytes | None:
    """Run the kernel over zeros, without its products."""
    tables, num_pages = cuda_on_host.scattered(lengths, PAGE, torch.Generator().manual_seed(1))
    pool = torch.zeros(num_pages, PAGE, LATENT + ROPE, dtype=torch.bfloat16)
    q, plan = torch.zeros(len(lengths), HEADS, LATENT + ROPE).bfloat16(), cuda_on_host.a_plan(tables, lengths, PAGE)
    into = Results(q, latent_width=LATENT, parts=parts, out_dtype=torch.bfloat16)
    return launch(arguments(q, pool, plan, into), 1, parts, pool.nbytes, without, False)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("lengths", [[1300], [64, 64, 64], [33, 1, 64, 0, 65, 500, 31, 0, 96]], ids=str)
def test_barriers_order_what_threads_and_copies_do_in_shared_memory(
    launch: Launch, lengths: list[int], parts: int
) -> None:
    assert failure(launch, lengths, parts) is None


# Numbers of cuda_on_host.h. What the barriers of a group or a warp order is what products read, which is not watched.
LEFT_OUT = {
    "the barrier of both groups": 1,
    "rows, or weights, are full": 17,
    "rows are empty": 18,
    "rows are empty, a phase too early": 19,
    "the fence before copies": 20,
}


@pytest.mark.parametrize("without", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_the_kernel_is_run_without_is_missed(launch: Launch, without: int) -> None:
    lengths = [330, 64, 90, 700]
    assert failure(launch, lengths, 1) is None
    assert failure(launch, lengths, 1, without=without) is not None


@pytest.mark.skipif(nvrtc.nvrtc_refuses() is not None, reason=f"{nvrtc.nvrtc_refuses()}")
def test_nvrtc_takes_the_source_and_nothing_is_spilled() -> None:
    image, log = nvrtc.compile_image(SOURCE, "sm_90a", {})

    assert image.startswith(b"\x7fELF")
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "Performance Loss" not in log


@pytest.mark.parametrize(
    ("device", "dtype", "heads", "latent", "row", "page", "reason"),
    [
        ("cpu", torch.bfloat16, 64, 512, 576, 64, "runs on cuda, not cpu"),
        ("cuda", torch.uint8, 64, 512, 576, 64, "takes bf16, not torch.uint8"),
        ("cuda", torch.bfloat16, 64, 256, 288, 64, "takes rows of 512 + 64, not 256 + 32"),
        ("cuda", torch.bfloat16, 64, 512, 576, 32, "takes pages of 64 rows, not 32"),
        (
            "cuda", torch.bfloat16, 16, 512, 576, 64,
            "works on 64 heads at a time, of which 16 fill little: Triton is faster there",
        ),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_refused_by_name(
    device: str, dtype: torch.dtype, heads: int, latent: int, row: int, page: int, reason: str
) -> None:
    assert cuda_choice.heads_decode_refuses(device, dtype, heads, latent, row, page) == reason
