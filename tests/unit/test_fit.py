"""What `up` asks before it starts anything: whether the weights fit, and how many GPUs there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvrelay.cli import fit
from kvrelay.core.errors import ModelLoadError, SettingsError
from kvrelay.core.layout import DTYPE_BYTES
from kvrelay.model.config import load_config
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.tensors import loaded_bytes

NOBODY = Path("/nonexistent/driver")


@pytest.mark.parametrize(("dtype", "loaded"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_weights_that_do_not_fit_are_refused_with_the_bytes(
    monkeypatch: pytest.MonkeyPatch, dtype: str, loaded: str
) -> None:
    monkeypatch.setattr(fit, "count_gpus", lambda: 0)
    one = loaded_bytes(load_config(embedded_checkpoint()), DTYPE_BYTES[loaded])
    memory = psutil.virtual_memory()

    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=3 * one))
    assert fit.check(str(embedded_checkpoint()), dtype=dtype, num_processes=3) == 0

    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=3 * one - 1))
    with pytest.raises(ModelLoadError, match=f"3 processes need {3 * one} bytes .* {3 * one - 1} are free"):
        fit.check(str(embedded_checkpoint()), dtype=dtype, num_processes=3)


def test_without_a_driver_nobody_is_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(NOBODY))

    assert fit.count_gpus((NOBODY,)) == 0


def test_with_a_driver_torch_is_asked_and_sees_what_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert fit.count_gpus((NOBODY, tmp_path)) == 0


def test_a_torch_that_does_not_load_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *args, **_: subprocess.CompletedProcess(args, 1, "", "Traceback\nOSError: no libcudart\n"),
    )

    with pytest.raises(SettingsError, match="OSError: no libcudart"):
        fit.count_gpus((tmp_path,))
