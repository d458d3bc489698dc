"""Requirements of kvrelay.model.loaded that need no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.bench import random_checkpoint
from kvrelay.bench.random_model import TINY
from kvrelay.core.errors import SettingsError
from kvrelay.core.settings import load
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.model.loaded import Loaded, choose_device


def test_ranks_may_share_a_cpu_but_not_a_gpu() -> None:
    assert choose_device("cpu", local_rank=1, num_ranks=2) == torch.device("cpu")

    with pytest.raises(SettingsError, match="cuda:0 cannot be that of 2 ranks"):
        choose_device("cuda:0", num_ranks=2)


@pytest.mark.parametrize(("name", "local_rank"), [("cuda", 999), ("cuda:999", 0)])
def test_a_gpu_that_is_not_there_is_refused_by_its_number(name: str, local_rank: int) -> None:
    with pytest.raises(SettingsError, match=f"cuda:999 is wanted; there are {torch.cuda.device_count()} GPUs"):
        choose_device(name, local_rank=local_rank)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:one", "cuda:-1", "cudas", ""])
def test_a_name_that_is_no_device_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(SettingsError, match=f"device {name} is none of auto, cpu, cuda and cuda:N"):
        choose_device(name)


def test_a_model_without_8_bit_rows_is_refused_with_its_width_and_the_limit(tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path, replace(TINY, kv_lora_rank=136), device=torch.device("cpu"))
    options = ["--model", str(tmp_path), "--device", "cpu", "--latent-format", "fp8", "--pool-pages", "2"]
    settings = load(DecodeSettings, options, prog="decode", environ={})

    with pytest.raises(SettingsError, match="latent width of 136, above 127, is not 128 times a power of two"):
        Loaded.load(settings)
