"""CUDA C++ kernels compiled for the host (cuda_on_host.h), and what their tests need around them."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrelay.kernels.cuda_decode import Results
from kvrelay.kernels.paged_plan import PagedPlan
from repo import ROOT

TILE = 32


def library(
    source: Path, main: str, folder: Path, *, threads: int, empty: Sequence[str], options: Sequence[str] = ()
) -> ctypes.CDLL:
    """Compile `main` of tests/ with the kernel beside `source`; its `launch` returns what went wrong, or null.

    Args:
        threads: of a block.
        empty: headers whose functions are the machine's to give.
    """
    if shutil.which("g++") is None or int(subprocess.check_output(["g++", "-dumpversion"]).split(b".")[0]) < 12:
        pytest.skip("no g++ from 12 on, which knows 16-bit floats")
    for file in source.parent.iterdir():
        shutil.copy(file, folder)
    for header in empty:
        (folder / header).write_text("")
    command = ["g++", "-std=c++20", "-O2", "-Wno-attributes", "-Wno-psabi", "-fPIC", f"-DBLOCK_THREADS={threads}"]
    watched = ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]  # its hooks are in shared_races.cpp
    for name, more in ((main, [*watched, *options]), ("shared_races.cpp", [])):
        file = ROOT / "tests" / name
        subprocess.run([*command, *more, f"-I{folder}", "-c", file, "-o", folder / f"{file.stem}.o"], check=True)
    subprocess.run(["g++", "-shared", *folder.glob("*.o"), "-o", folder / "host.so"], check=True)
    loaded = ctypes.CDLL(str(folder / "host.so"))
    loaded.launch.restype = ctypes.c_char_p
    return loaded


def scattered(lengths: Sequence[int], page: int, random: torch.Generator) -> tuple[list[list[int]], int]:
    """Return a table of pages for each sequence, and how many pages there are: two more than they use."""
    counts = [-(-length // page) for length in lengths]
    shuffled = torch.randperm(sum(counts) + 2, generator=random)[: sum(counts)]
    return [part.tolist() for part in torch.split(shuffled, counts)], sum(counts) + 2


def a_plan(tables: list[list[int]], lengths: list[int], page: int) -> PagedPlan:
    plan = PagedPlan.allocate(
        num_sequences=len(lengths), max_pages=max(map(len, tables)), page_tokens=page, device=torch.device("cpu")
    )
    for row, table in enumerate(tables):
        plan.page_table_BP[row, : len(table)] = torch.tensor(table)
    plan.lengths_B.copy_(torch.tensor(lengths))
    plan.starts_B1[1:] = ((plan.lengths_B + TILE - 1) // TILE).cumsum(0)
    return plan


def joined(into: Results, plan: PagedPlan, parts: int, *, tiles: int = 1) -> Tensor:
    """Do what `triton_join` does, plainly."""
    starts, out_BNC = plan.starts_B1.tolist(), into.out_BNC.float()
    per_part = -(-max(-(-starts[-1] // parts), 2) // tiles) * tiles
    for seq, (start, end) in enumerate(itertools.pairwise(starts)):
        first, last = start // per_part, (end - 1) // per_part
        if start == end:
            out_BNC[seq] = 0
        elif first < last:
            pieces = slice(first + seq, last + seq + 1)
            weight_JN = torch.softmax(into.lse_JN[pieces].double() * torch.tensor(2.0).log(), 0)
            out_BNC[seq] = (into.pieces_JNC[pieces] * weight_JN[..., None]).sum(0)
    return out_BNC
