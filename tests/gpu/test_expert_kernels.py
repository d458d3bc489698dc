"""The kernels around products of experts on a device."""

from __future__ import annotations

import pytest
import torch

from expert_kernels_contract import *  # noqa: F403 - its tests are collected here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
