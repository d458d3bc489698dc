"""The kernels for few tokens on a device."""

from __future__ import annotations

import pytest
import torch

from few_tokens_contract import *  # noqa: F403 - its tests are collected here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
