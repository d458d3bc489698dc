"""Whether Triton kernels can run here, and what a device has for them."""

from __future__ import annotations

import functools

import torch

from kvrelay.kernels.optional import import_refuses


@functools.cache  # asked in every layer of every step
def triton_refuses(device: str) -> str | None:
    """Return None, or the reason; on a CPU they run in Triton's interpreter, for checking (TRITON_INTERPRET=1)."""
    why = import_refuses("triton", "triton")
    if why is not None:
        return why
    from triton import knobs  # noqa: PLC0415 - optional, and slow to import

    if device == "cuda":
        return None
    if device == "cpu" and knobs.runtime.interpret:
        return None
    return f"runs on cuda, not {device}"


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return how many a device has; where programs are interpreted few, but enough to cut sequences."""
    if device.type != "cuda":
        return 6
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return how much of a processor's memory one program may have; where it is interpreted, as much as on an H200."""
    if device.type != "cuda":
        return 227 * 1024
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Say whether kernels may begin before the one in front has ended; see `triton_wait`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
