"""The Triton kernels in Triton's interpreter: a process of its own, as the switch is read when kernels are defined."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from repo import ROOT


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("contract", "marks"),
    [
        ("kernel_contract.py", "not full"),
        pytest.param("kernel_contract.py", "full", marks=pytest.mark.full),
        ("kernel_contract_rows.py", ""),
        ("decode_graphs_contract.py", ""),
        ("few_tokens_contract.py", ""),
        ("expert_kernels_contract.py", ""),
    ],
)
def test_triton_kernels_keep_their_contract_in_the_interpreter(contract: str, marks: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, str(ROOT / "tests" / contract)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip

    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout
