"""The kernels' contract on a device."""

from __future__ import annotations

import pytest
import torch

from kernel_contract import *  # noqa: F403 - its tests are collected here
from kernel_contract_rows import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
