"""Requirements of kvrelay.model.loaded that need no GPU."""

from __future__ import annotations

import pytest
import torch

from kvrelay.core.errors import SettingsError
from kvrelay.model.loaded import choose_device


def test_ranks_may_share_a_cpu_but_not_a_gpu() -> None:
    assert choose_device("cpu", local_rank=1, num_ranks=2) == torch.device("cpu")

    with pytest.raises(SettingsError, match="cuda:0 cannot be that of 2 ranks"):
        choose_device("cuda:0", num_ranks=2)


@pytest.mark.parametrize(("name", "local_rank"), [("cuda", 999), ("cuda:999", 0)])
def test_a_gpu_that_is_not_there_is_refused_by_its_number(name: str, local_rank: int) -> None:
    with pytest.raises(SettingsError, match=f"cuda:999 is wanted; there are {torch.cuda.device_count()} GPUs"):
        choose_device(name, local_rank=local_rank)
