"""The CUDA C++ kernel that writes scattered pieces: its source run on the host, and what it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cuda_on_host import library
from kvrelay.kernels import cuda_write, nvrtc
from kvrelay.kernels.cuda_write import SOURCE, Arguments, Pieces, cut_long

Launch = Callable[[Arguments, int, int], bytes | None]
UNIT = 2048


@pytest.fixture(scope="module", params=[(7, 4), (4, 1), pytest.param((5, 4), marks=pytest.mark.full)], ids=str)
def launch(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Launch:
    stages, ahead = request.param
    defines = (f"-DUNIT={UNIT}", f"-DSTAGES={stages}", f"-DAHEAD={ahead}")
    folder = tmp_path_factory.mktemp("write_on_host")
    loaded = library(SOURCE, "write_on_host.cpp", folder, threads=32, empty=("ptx.cuh",), options=defines)
    loaded.launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    return lambda arguments, blocks, source_bytes: loaded.launch(ctypes.addressof(arguments), blocks, 1, source_bytes)


def scattered(sizes: np.ndarray[Any, Any], random: np.random.Generator, *, gap_bytes: int) -> np.ndarray[Any, Any]:
    """Return where pieces of these sizes begin when they lie in random order."""
    order = random.permutation(len(sizes))
    ends = np.cumsum(sizes[order] + gap_bytes)
    begins = np.empty_like(ends)
    begins[order] = ends - sizes[order] - gap_bytes
    return begins


@pytest.mark.parametrize("num_blocks", [1, 3, 8])
@pytest.mark.parametrize("num_pieces", [1, 5, 70])
@pytest.mark.parametrize("even", [True, False])
def test_the_kernel_on_the_host_writes_each_piece_to_its_place_and_nothing_beside_it(
    launch: Launch, num_blocks: int, num_pieces: int, even: bool
) -> None:
    random = np.random.default_rng(num_pieces)
    sizes = np.full(num_pieces, 288) if even else random.integers(0, 300, num_pieces)
    sizes = sizes * 16
    pieces: Pieces = np.stack(
        (scattered(sizes, random, gap_bytes=0), scattered(sizes, random, gap_bytes=16), sizes), axis=1
    )
    here = torch.from_numpy(random.integers(1, 256, sizes.sum() + 16, dtype=np.uint8))
    there = torch.zeros(sizes.sum() + 16 * num_pieces, dtype=torch.uint8)
    expected = there.clone()
    for source, target, num_bytes in pieces.tolist():
        expected[target : target + num_bytes] = here[source : source + num_bytes]

    arguments = Arguments.of(
        here.data_ptr(), there.data_ptr(), pieces.ctypes.data,
        num_pieces=num_pieces, longest_bytes=int(sizes.max()), most_unit_bytes=UNIT,
    )  # fmt: skip
    assert launch(arguments, num_blocks, len(here)) is None

    assert torch.equal(there, expected)


def test_long_pieces_are_cut_and_all_others_stay() -> None:
    most = cuda_write.MOST_PIECE_BYTES
    pieces: Pieces = np.array([(0, 64, 48), (1 << 30, 1 << 20, 2 * most + 16), (16, 0, 0), (96, 1 << 25, most)])

    assert (cut_long(pieces[[0, 2, 3]]) == pieces[[0, 2, 3]]).all()
    assert cut_long(pieces).tolist() == [
        [0, 64, 48],
        *([(1 << 30) + at, (1 << 20) + at, size] for at, size in ((0, most), (most, most), (2 * most, 16))),
        [16, 0, 0],
        [96, 1 << 25, most],
    ]


@pytest.mark.parametrize(
    ("longest_bytes", "units_each", "unit_bytes"), [(73_728, 4, 18_432), (41_984, 3, 14_080), (16, 1, 128), (0, 1, 0)]
)
def test_units_of_a_piece_are_of_one_size_and_whole_lines(longest_bytes: int, units_each: int, unit_bytes: int) -> None:
    found = Arguments.of(0, 0, 0, num_pieces=5, longest_bytes=longest_bytes, most_unit_bytes=18 << 10)

    assert (found.num_units, found.units_each, found.unit_bytes) == (5 * units_each, units_each, unit_bytes)


def test_a_host_has_no_such_kernel() -> None:
    assert cuda_write.write_refuses(torch.device("cpu")) == "runs on cuda, not cpu"


@pytest.mark.skipif(nvrtc.nvrtc_refuses() is not None, reason=f"{nvrtc.nvrtc_refuses()}")
def test_nvrtc_takes_the_source() -> None:
    defines = {"UNIT": cuda_write.UNIT_BYTES, "STAGES": cuda_write.STAGES, "AHEAD": cuda_write.AHEAD}
    image, log = nvrtc.compile_image(SOURCE, "sm_90a", defines)

    assert image.startswith(b"\x7fELF")
    assert "Compiling entry function 'write_pieces'" in log
