"""Waiting for a device without standing in the way of this process's other threads."""

from __future__ import annotations

import torch
from torch import Tensor


def wait_for(computed: Tensor) -> None:
    """Wait until a device has computed a tensor; to be called before its numbers are brought to pageable memory.

    Such a copy that finds work in front of it waits inside the driver, and whatever other threads ask of the device
    meanwhile waits with it: checksums and writes of a whole chunk would come to a stop until its end.
    """
    if computed.is_cuda:
        with torch.cuda.device(computed.device):
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record()
        reached.synchronize()
