"""The CUDA C++ decode kernel: its source run on the host, and what it refuses."""

from __future__ import annotations

import ctypes
from typing import Protocol

import pytest
import torch

import cuda_on_host
from kvrelay.core.errors import NoKernelError
from kvrelay.core.layout import FP8_GROUP_NUMBERS, fp8_groups, fp8_row_bytes
from kvrelay.kernels import cuda_choice, nvrtc, quant, reference
from kvrelay.kernels.cuda_decode import HEADS, SOURCE, STAGES, THREADS, Arguments, Results, compile_refuses

PAGE = 32  # so that a tile of 64 rows lies in two pages
STAGES_HERE = 3  # so that a tile's place among the copies and that among the weights are seldom the same
LATENT, ROPE = 512, 64
NOT_A_NUMBER = 0xFF  # a byte of it, in every type of a row
WHOLE = 0  # the kernel with all of its barriers


class Launch(Protocol):
    """Returns what went wrong, a race in shared memory included, or None."""

    def __call__(
        self,
        args: Arguments,
        head_blocks: int,
        parts: int,
        pool_bytes: int,
        *,
        without: int = WHOLE,
        exact: bool = True,
    ) -> bytes | None: ...


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    library = cuda_on_host.library(
        SOURCE, "decode_on_host.cpp", tmp_path_factory.mktemp("decode_on_host"),
        threads=THREADS, empty=("ptx.cuh",), options=(f"-DPAGE={PAGE}", f"-DSTAGES={STAGES_HERE}"),
    )  # fmt: skip
    library.launch.argtypes = [
        ctypes.POINTER(Arguments), ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_bool,
    ]  # fmt: skip

    def run(
        args: Arguments, head_blocks: int, parts: int, pool_bytes: int, *, without: int = WHOLE, exact: bool = True
    ) -> bytes | None:
        why: bytes | None = library.launch(ctypes.byref(args), head_blocks, parts, pool_bytes, without, exact)
        return why

    return run


@pytest.mark.parametrize(
    ("lengths", "heads", "parts", "octaves"),
    [
        ([1], 16, 1, 0),
        ([33], 5, 1, 2),
        ([800], 16, 3, 3),  # parts of an odd number of tiles of 32 rows
        ([70, 0, 3, 190], 20, 4, 30),
        ([200, 0, 0, 77, 64, 31, 32, 400], 16, 5, 6),
    ],
    ids=str,
)
def test_the_kernel_on_the_host_equals_the_reference(
    launch: Launch, lengths: list[int], heads: int, parts: int, octaves: int
) -> None:
    random = torch.Generator().manual_seed(len(lengths))
    tables, num_pages = cuda_on_host.scattered(lengths, PAGE, random)
    pool = torch.full((num_pages, PAGE, fp8_row_bytes(LATENT, ROPE)), NOT_A_NUMBER, dtype=torch.uint8)
    for table, length in zip(tables, lengths, strict=True):
        if not length:
            continue
        rows = torch.randn(len(table) * PAGE, LATENT + ROPE, generator=random)
        spread = torch.randint(-octaves, octaves + 1, (len(rows), fp8_groups(LATENT)), generator=random)
        rows[:, :LATENT] *= torch.exp2(spread).repeat_interleave(FP8_GROUP_NUMBERS, 1)
        packed = quant.quantise(rows, latent_width=LATENT)
        packed[length:] = NOT_A_NUMBER
        pool[table] = packed.view(-1, *pool.shape[1:])
    q = torch.randn(len(lengths), heads, LATENT + ROPE, generator=random).to(torch.bfloat16)
    plan, scale = cuda_on_host.a_plan(tables, lengths, PAGE), 0.1 * 2.0**-octaves
    into = Results(q, latent_width=LATENT, parts=parts)

    args = Arguments.of(q, pool, plan, into, scale=scale, early=False)
    assert launch(args, -(-heads // HEADS), parts, pool.numel()) is None
    out = cuda_on_host.joined(into, plan, parts)

    exact = quant.dequantise(pool.flatten(0, 1), latent_width=LATENT, dtype=torch.float32).view(*pool.shape[:2], -1)
    for seq, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if not length:
            assert not out[seq].any()
            continue
        expected = reference.mla_decode(
            q[seq : seq + 1].float(), exact, [table], [length], scale=scale, latent_width=LATENT
        )
        assert float((out[seq] - expected[0]).norm() / expected.norm()) < 1e-3  # weights are rounded to f16


def failure(launch: Launch, lengths: list[int], parts: int, *, without: int = WHOLE) -> bytes | None:
    """Run the kernel over zeros, without its products."""
    counts = [-(-length // PAGE) for length in lengths]
    tables = [part.tolist() for part in torch.split(torch.arange(sum(counts)), counts)]
    pool = torch.zeros(sum(counts), PAGE, fp8_row_bytes(LATENT, ROPE), dtype=torch.uint8)
    q = torch.zeros(len(lengths), HEADS, LATENT + ROPE, dtype=torch.bfloat16)
    plan = cuda_on_host.a_plan(tables, lengths, PAGE)
    into = Results(q, latent_width=LATENT, parts=parts)
    args = Arguments.of(q, pool, plan, into, scale=1.0, early=False)
    return launch(args, 1, parts, pool.numel(), without=without, exact=False)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize(
    "lengths", [[1300], [64, 64, 64, 64, 64], [33, 1, 64, 0, 65, 500, 31, 0, 96], [1, 1, 700, 1, 1, 1, 100]], ids=str
)
def test_barriers_order_all_that_warps_and_copies_do_in_shared_memory(
    launch: Launch, lengths: list[int], parts: int
) -> None:
    assert failure(launch, lengths, parts) is None


# Numbers of cuda_on_host.h.
LEFT_OUT = {
    "the scorers' barrier": 1,
    "weights are full": 2,
    "weights are empty": 4,
    "__syncwarp": 16,
    "rows are full": 17,
    "rows are empty": 18,
    "rows are empty, a phase too early": 19,
    "the fence before copies": 20,
}


@pytest.mark.parametrize("without", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_the_kernel_is_run_without_is_missed(launch: Launch, without: int) -> None:
    lengths = [70, 33, 90, 1, 700]
    assert failure(launch, lengths, 1) is None
    assert failure(launch, lengths, 1, without=without) is not None


needs_nvrtc = pytest.mark.skipif(nvrtc.nvrtc_refuses() is not None, reason=f"{nvrtc.nvrtc_refuses()}")


@needs_nvrtc
def test_nvrtc_takes_the_source() -> None:
    image, log = nvrtc.compile_image(SOURCE, "sm_90a", {"PAGE": 64, "STAGES": STAGES})

    assert image.startswith(b"\x7fELF")
    assert "Compiling entry function 'decode'" in log
    with pytest.raises(NoKernelError, match="error: "):
        nvrtc.compile_image(SOURCE, "sm_90a", {"PAGE": 64})


@needs_nvrtc
def test_what_cannot_be_built_is_refused_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 9))

    why = compile_refuses(torch.device("cuda", 7), 64)

    assert why is not None
    assert why.startswith("cannot be built: ")
    assert "invalid value for --gpu-architecture" in why
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("device", "dtype", "latent", "row", "page", "reason"),
    [
        ("cpu", torch.uint8, 512, 576, 64, "runs on cuda, not cpu"),
        ("cuda", torch.bfloat16, 512, 576, 64, "takes rows of 8 bits, not torch.bfloat16"),
        ("cuda", torch.uint8, 256, 288, 64, "takes rows of 512 + 64, not 256 + 32"),
        ("cuda", torch.uint8, 512, 576, 48, "takes pages of whole tiles of 32 rows, not of 48"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    device: str, dtype: torch.dtype, latent: int, row: int, page: int, reason: str
) -> None:
    assert cuda_choice.cuda_decode_refuses(device, dtype, latent, row, page) == reason
